"""Whether two models are the same: their next-token distributions on the same texts.

The texts are prompts of validation examples of the run, and a fixed set with Unicode, spaces, numbers and code. KL is
the divergence of the second model's distribution from the first one's, in nats per token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from backend import registry
from backend.config import RunSpec
from backend.runs.json_values import read
from backend.train.generation_eval import BEFORE
from backend.train.run_log import TrainError

MAX_TOKENS, MAX_POSITIONS = 128, 512  # per text; in total, which bounds memory
MAX_HELD_OUT = 8
TEXTS = (
    "What is the capital of France?",
    "Write a short poem about the sea in two lines.",
    "  Leading spaces,\ttabs, and   runs of spaces\n\nand empty lines  ",
    "Zażółć gęślą jaźń. 東京は日本の首都です。 Привет, мир! ½ ① ٣ 🙂👩‍👩‍👧",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2  # in m²",
    "12345 + 67890 = 80235; 0x1F = 31; 1e-4 < 0.001",
)


@dataclass(frozen=True)
class Difference:
    """How far a model is from another one on `positions` tokens: mean and largest KL, and the share of tokens with the
    same most likely next token. For a reward model, the figures are differences between scores."""

    positions: int
    kl_mean: float
    kl_max: float
    same_argmax: float

    def as_json(self) -> dict[str, Any]:
        """For the certificate."""
        return asdict(self)


def probe_batches(run_folder: Path, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids of each text, of shape (1, tokens): at most MAX_POSITIONS tokens in all. The fixed texts come first,
    since they are short."""
    rendered = [*(_render(tokenizer, text) for text in TEXTS), *held_out(run_folder)]
    batches, left = [], MAX_POSITIONS
    for text in rendered:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"][: min(MAX_TOKENS, left)]
        if len(tokens) > 1:
            batches.append(torch.tensor([tokens]))
            left -= len(tokens)
        if left < 2:
            break
    return batches


def provenance(spec: RunSpec, batches: Sequence[torch.Tensor], *packages: str) -> dict[str, Any]:
    """For the certificate: with which versions and instructions, and on which token ids, the comparison computes, so
    that it can be repeated. The texts are not in it, since a certificate may be published. `packages`: further ones."""
    own = registry.QUANTIZATIONS[spec.method.quantization].package
    names = ("footplate", "torch", "transformers", "peft", "safetensors", *packages, *([own] if own else []))
    ids = b"".join(batch.to(torch.int64).numpy().tobytes() for batch in batches)
    return {
        "versions": {name: metadata.version(name) for name in names},
        "compared": {
            "texts": len(batches),
            "tokens": sum(batch.shape[1] for batch in batches),
            "token_ids_sha256": hashlib.sha256(ids).hexdigest(),
            "device": "cpu",
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
    }


def held_out(run_folder: Path, with_output: bool = True) -> list[str]:
    """Rendered prompts of validation examples, with the generations from before training unless `with_output` is False;
    empty for a run that generated none."""
    try:
        return [prompt + output * with_output for prompt, output in read(run_folder / BEFORE)][:MAX_HELD_OUT]
    except (OSError, ValueError, TypeError):
        return []


def _render(tokenizer: Any, text: str) -> str:
    if not tokenizer.chat_template:
        return text
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False))
    except Exception:  # a template that requires other roles or variables
        return text


@torch.no_grad()  # type: ignore[untyped-decorator]
def log_probabilities(model: Any, batches: Sequence[torch.Tensor], name: str = "model") -> list[torch.Tensor]:
    """For each text the log-probabilities of shape (tokens, vocabulary) in fp32; for a reward model the score, (1, 1).
    `name` is that of the model in errors. Raises TrainError for values that are NaN or infinite."""
    model.eval()
    found = []
    for ids in batches:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
        if not output.isfinite().all():
            raise TrainError(f"The outputs of the {name} contain NaN or infinity, so nothing was saved.")
        found.append(output if output.dim() == 2 else output[0].log_softmax(-1))
    return found


def compare(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> Difference:
    """How far `found` is from `expected`, both of `log_probabilities`."""
    pairs = list(zip(expected, found, strict=True))
    if expected[0].shape == (1, 1):  # scores
        gaps = [abs(float(a) - float(b)) / max(1.0, abs(float(a))) for a, b in pairs]
        return Difference(len(gaps), sum(gaps) / len(gaps), max(gaps), 1.0)
    kl = divergences(expected, found)
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    mean, most = float(kl.mean().clamp(min=0)), float(kl.max().clamp(min=0))
    return Difference(len(kl), mean, most, float(same.float().mean()))


def divergences(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> torch.Tensor:
    """The KL divergence of `found` from `expected` at each position, in nats."""
    return torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(expected, found, strict=True)])


def write_certificate(path: Path, certificate: dict[str, Any]) -> None:
    """Write the certificate next to the model."""
    path.write_text(json.dumps(certificate, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
