"""`python -m backend.train.load_model FOLDER`: loads the model that a run has saved in its FOLDER, and uses it once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from backend import registry
from backend.config import RunSpec
from backend.models import trained
from backend.runs import LOCK, MODEL, RESULT
from backend.runs.files import write_json
from backend.train import device, exit, model, quantized, verify
from backend.train.run_log import RunLog, TrainError
from backend.train.templates import ChatTokenizer, UnsupportedConversation
from backend.wording import counted

NEW_TOKENS = 8
PROMPT = "Hello"


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Load the model of the run whose folder is the argument, and generate or score a text."""
    sys.excepthook = exit.print_error
    trained, started = Path(sys.argv[1]).resolve(), (Path.cwd() / LOCK).stat().st_mtime
    spec, run = verify.read_plan(trained)
    log = RunLog(Path.cwd())
    log.start_phase("loading the saved model", f"Loading {trained / MODEL}.")
    tokenizer = AutoTokenizer.from_pretrained(trained / MODEL, trust_remote_code=spec.model.trust_remote_code)
    loaded = _load(spec, run.device, run.compute_dtype, trained / MODEL)
    log.start_phase("using the saved model", "Using the model once.")
    text = _use(spec, loaded, tokenizer)
    log.info(text)
    write_json(
        Path.cwd() / RESULT, {"peak_bytes": device.peak_bytes(run.device), "seconds": round(time.time() - started, 3)}
    )


def _load(spec: RunSpec, family: str, precision: str, folder: Path) -> Any:
    """The saved model; peft loads an adapter together with its base model, which gets rows for added tokens."""
    adapter, more = (folder / trained.ADAPTER).is_file(), dict[str, Any]()
    kind: Any = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    if registry.STAGES[spec.train.stage].is_reward_model:
        kind = AutoPeftModelForSequenceClassification if adapter else AutoModelForSequenceClassification
        more = {"num_labels": 1}
    dtype = device.DTYPES[precision]
    source = model.locate(spec, lambda text, fraction: None)
    if not spec.save.merge_adapter:
        more |= quantized.load_arguments(spec, source.name, source.options, dtype)
    if family != "cpu":
        more["device_map"] = "auto"  # over all devices of the run
    try:
        return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=spec.model.trust_remote_code, **more).eval()
    except Exception as error:  # errors of many kinds
        raise TrainError(f"The saved model could not be loaded: {str(error).strip().splitlines()[0]}") from error


def _use(spec: RunSpec, loaded: Any, tokenizer: Any) -> str:
    """A generation, or the score of a text, as a line of the log. Raises TrainError."""
    text = PROMPT
    if tokenizer.chat_template and spec.train.stage != "pretraining" and spec.data.format != "text":
        try:
            chat = ChatTokenizer.create(tokenizer, True, spec.data.template_kwargs)
            text = chat.render_prompt([{"role": "user", "content": PROMPT}])
        except UnsupportedConversation as error:
            raise TrainError(f"The saved model cannot be prompted with a user turn: {error}.") from error
    batch = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(loaded.device)
    with torch.no_grad():
        if registry.STAGES[spec.train.stage].is_reward_model:
            return f"Score of a text: {float(loaded(**batch).logits[0, 0]):.4g}"
        output = loaded.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    new = output[0, batch["input_ids"].shape[1] :]
    return f"Generated {counted(len(new), 'token')}: {tokenizer.decode(new)!r}"


if __name__ == "__main__":
    main()
    exit.exit_now()
