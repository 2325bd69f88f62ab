"""`python -m backend.inference.benchmark_probe ENVIRONMENT`: scores a tiny model on a tiny task with lm-eval. It runs
when the environment lm-eval is created, and fails if lm-eval does not work with the installed libraries, or gives
different values than transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from backend.inference.benchmark import harness

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *["the", "sky", "is", "blue", "grass", "green", "red"]]
TASK = """
task: probe
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "the {{thing}} is"
doc_to_choice: [blue, green]
doc_to_target: color
"""


def main() -> None:
    """Score, and compare with the logits of the model."""
    lm_eval = harness(Path(sys.argv[1]).resolve())
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes)).eval()
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        (folder / "task.yaml").write_text(TASK, encoding="utf-8")
        lines = [{"thing": "sky", "color": "blue"}, {"thing": "grass", "color": "green"}]
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        tasks = lm_eval.load([str(folder / "task.yaml")], None, False)
        lm = lm_eval.LoadedModel(model, _tokenizer(), [2], lambda: None)
        samples = lm_eval.evaluate(lm, tasks, 0, False, False)["samples"]["probe"]
        for line, sample in zip(lines, samples, strict=True):
            own = _log_probabilities(model, f"the {line['thing']} is")
            found = [answer[0][0] for answer in sample["resps"]]
            for word, value in zip(("blue", "green"), found, strict=True):
                if abs(value - own[WORDS.index(word)]) > 1e-4:
                    sys.exit(f"lm-eval gives {value} for {word!r}, transformers {own[WORDS.index(word)]}")


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def _log_probabilities(model: Any, text: str) -> list[float]:
    """The log-probability of each next token, in nats."""
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    return list(model(ids).logits[0, -1].log_softmax(-1).tolist())


if __name__ == "__main__":
    main()
