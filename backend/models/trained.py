"""The model that a run has trained: where it is, what it is, and the Python code that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.models import system_prompt
from backend.models.python_text import literal
from backend.models.spec import read_spec
from backend.registry import llamafactory_names
from backend.runs import CHECKPOINTS, JOBS, LLAMAFACTORY, LOCK, MODEL, SPEC, json_values
from backend.runs.folder import Run, RunError

ADAPTER, CONFIG, TOKENIZER = "adapter_config.json", "config.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
# Files and folders of a checkpoint that are not part of the model begin with these names: the state for resuming, those
# of FSDP and DeepSpeed among them, and Footplate's own files.
TRAINING_STATE = (
    "optimizer", "scheduler", "rng_state", "scaler", "trainer_state", "training_args", "complete",
    "pytorch_model_fsdp", "global_step", "zero_to_fp32",
)  # fmt: skip
OTHER_STATE = ("latest", "ref")  # DeepSpeed's pointer to its newest state, and the reference adapter of DPO and KTO
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json", "adapter_model.bin")


@dataclass(frozen=True)
class TrainedModel:
    """`step`: of the checkpoint, None for the final model; `base`: the model that an adapter belongs to, '' for full
    weights; `bytes`: the size of all files; `code`: Python that loads the model and uses it; `further`: the options
    with which a run trains the model further, None for a checkpoint that belongs to modified base weights;
    `is_reward_model`: it has a scalar head instead of the LM head."""

    folder: Path
    step: int | None
    base: str
    bytes: int
    code: str
    further: Mapping[str, Any] | None
    is_reward_model: bool

    @property
    def is_residual(self) -> bool:
        """Whether it is an adapter that was taken out of the base weights, so that it fits only the modified base
        weights."""
        return bool(self.base) and self.further is None

    def files(self) -> list[Path]:
        """The files of the model, without those of the training's state."""
        return files_in(self.folder)

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {
            "folder": str(self.folder),
            "step": self.step,
            "base": self.base,
            "bytes": self.bytes,
            "code": self.code,
            "further": self.further,
            "is_reward_model": self.is_reward_model,
        }


def find(run: Run) -> TrainedModel | None:
    """The final model of a run, else that of its newest checkpoint; None if neither can be loaded as it is, since
    checkpoints of DeepSpeed and FSDP have the weights in shards, or if the final model is that of an earlier start."""
    is_complete = bool(run.result().get("model"))
    steps = [] if is_complete else run.checkpoints()[-1:]
    return at_step(run, steps[0] if steps else None)


def at_step(run: Run, step: int | None) -> TrainedModel | None:
    """The model in the checkpoint of a `step`, or the final model (None); None if it cannot be loaded as it is."""
    folder = run.path / MODEL if step is None else run.path / CHECKPOINTS / f"checkpoint-{step}"
    try:
        changed = folder.stat().st_mtime_ns
    except OSError:
        return None
    if step is None and not run.result().get("model") and _started_after(run, changed):
        return None
    spec = _spec(run)
    runs_code, is_text = (spec.model.trust_remote_code, continues_text(spec)) if spec else (False, False)
    return _described(folder, step, changed, _system_prompt(run), runs_code, is_text)


def models(run: Run) -> list[TrainedModel]:
    """All models of a run that can be loaded: the final one, then those of the checkpoints, the newest first."""
    steps = [None, *reversed(run.checkpoints())]
    return [found for step in steps if (found := at_step(run, step))]


NONE_LOADABLE = "This run has no model that can be loaded on this machine."


def not_loadable(step: int | None, steps: Iterable[int | None]) -> str:
    """The error that the model of this `step` cannot be loaded, only those of `steps`; None is the final model."""
    known = ", ".join(str(each) for each in steps if each is not None)
    which = "final model" if step is None else f"checkpoint of step {step}"
    return f"The {which} cannot be loaded. Steps of checkpoints: {known or 'none'}."


def _started_after(run: Run, changed: int) -> bool:
    try:
        return (run.path / LOCK).stat().st_mtime_ns > changed
    except OSError:  # Footplate did not start the run
        return False


@lru_cache(maxsize=64)  # the page asks each second, and these files are written once
def _described(
    folder: Path, step: int | None, changed: int, system: str, runs_code: bool, is_text: bool
) -> TrainedModel | None:
    """The model in a folder that was `changed` at this time, trained with this system prompt; `runs_code`: model and
    tokenizer are those of the model's own code; `is_text`: it continues texts."""
    try:
        names = {path.name for path in folder.iterdir()}
        if not names.intersection(WEIGHTS) or TOKENIZER not in names:
            return None
        config = json_values.read(folder / (ADAPTER if ADAPTER in names else CONFIG))
        size = sum(path.stat().st_size for path in files_in(folder))
        base = str(config.get("base_model_name_or_path") or "") if ADAPTER in names else ""
        code = _code(folder, config, ADAPTER in names, GENERATION in names, system, runs_code, is_text)
    except (OSError, ValueError, AttributeError):
        return None
    further = _further(folder, config, ADAPTER in names)
    return TrainedModel(folder, step, base, size, code, further, _is_reward_model(config))


# Initializations that subtract the initial adapter from the base weights: disabling the adapter does not restore them.


# Keys of adapter_config.json -> what a LoRA adapter has besides its matrices, or computes differently, if the key is
# set. Neither llama.cpp nor vLLM supports these.
OTHER_PARTS = {
    "use_dora": "DoRA magnitude vectors",
    "lora_bias": "biases of the LoRA matrices (lora_bias)",
    "modules_to_save": "modules that were trained in full (lora.modules_to_save)",
    "trainable_token_indices": "trained embeddings of added tokens",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "invocation tokens (Activated LoRA)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "use_qalora": "grouped input features (QALoRA)",
    "arrow_config": "Arrow routing",
}


def other_parts(adapter: Mapping[str, Any]) -> list[str]:
    """What a LoRA adapter with this configuration has besides plain LoRA matrices."""
    parts = [label for key, label in OTHER_PARTS.items() if adapter.get(key)]
    bias = adapter.get("bias") or "none"
    return parts + ([f"trained biases (bias={bias})"] if bias != "none" else [])


def trained_on(run: Run) -> str:
    """The device type that a run was trained on, or the name of LLaMA-Factory if that trained it."""
    return llamafactory_names.NAME if (run.path / LLAMAFACTORY).exists() else str(run.resolved().get("device"))


def is_residual(adapter: Mapping[str, Any]) -> bool:
    """Whether an adapter with this configuration was taken out of the base weights. Final models are converted."""
    return registry.is_residual(adapter.get("init_lora_weights"))


def _further(folder: Path, config: Mapping[str, Any], is_adapter: bool) -> Mapping[str, Any] | None:
    start = {"save.resume_from": "latest"}  # not from a checkpoint
    if not is_adapter:
        return {**start, "model.source": "path", "model.path": str(folder), "lora.adapter_path": ""}
    if is_residual(config):
        return None
    own = {"lora.r": config.get("r"), "lora.alpha": config.get("lora_alpha")}  # PiSSA's r was doubled
    return {**start, "lora.adapter_path": str(folder), **{name: value for name, value in own.items() if value}}


def files_in(folder: Path) -> list[Path]:
    """The files of the model in a folder, without those of the training's state."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not is_state(path.relative_to(folder)))


def is_state(path: PurePath) -> bool:
    """Whether the file with this path in the folder of a checkpoint belongs to the state of the training."""
    return path.parts[0] in OTHER_STATE or any(part.startswith(TRAINING_STATE) for part in path.parts)


def _system_prompt(run: Run) -> str:
    """The system prompt of training."""
    return system_prompt.of_run(_training(run).path / SPEC)


def _spec(run: Run) -> RunSpec | None:
    """The options of training; None if they cannot be read."""
    try:
        return read_spec(_training(run))
    except RunError:
        return None


def continues_text(spec: RunSpec) -> bool:
    """Whether a model was trained to continue texts, without its chat template."""
    return spec.train.stage == "pretraining" or system_prompt.is_text(spec)


def _training(run: Run) -> Run:
    """The run itself; for a merge, which is a job of a run, that run."""
    return Run(run.path.parent.parent) if run.path.parent.name == JOBS else run


def _is_reward_model(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or [""]
    return config.get("task_type") == "SEQ_CLS" or str(architectures[0]).endswith("ForSequenceClassification")


def _code(
    folder: Path, config: dict[str, Any], is_adapter: bool, has_ends: bool, system: str, runs_code: bool, is_text: bool
) -> str:
    scores = _is_reward_model(config)
    # An adapter is loaded with the base model's generation config, which may lack the token that ends completions.
    own = is_adapter and has_ends and not scores
    # An adapter is loaded with the base model's config, which has no padding token if the model did not need one.
    labels = ", num_labels=1, pad_token_id=tokenizer.pad_token_id" if scores else ""
    options = f'dtype="auto", device_map="auto"{labels}'
    loading = loading_code(folder, is_adapter, scores, ("GenerationConfig",) if own else (), options, runs_code)
    if has_template(folder) and not is_text:
        prompt = _chat_code(system, scores)
    else:
        prompt = PLAIN + ("" if scores or not _adds_eos(folder) else WITHOUT_EOS)
    return f"{loading}{OWN_ENDS if own else ''}{prompt}{TO_DEVICE}{SCORE if scores else GENERATE}"


def loading_code(
    folder: Path, is_adapter: bool, scores: bool, names: Iterable[str], options: str, runs_code: bool
) -> str:
    """Code that imports `names` of transformers, and loads tokenizer and model of a folder; `options`: arguments of
    from_pretrained for the model, after the folder; `runs_code`: it trusts the model's own code."""
    kind = f"Auto{'Peft' if is_adapter else ''}ModelFor{'SequenceClassification' if scores else 'CausalLM'}"
    imported = ", ".join([*([] if is_adapter else [kind]), "AutoTokenizer", *names])
    imports = f"from peft import {kind}\n" if is_adapter else ""
    trust = ", trust_remote_code=True" if runs_code else ""
    values = {"folder": literal(str(folder)), "kind": kind, "options": options, "trust": trust}
    return LOADING.format(imports=imports, names=imported, **values)


def _adds_eos(folder: Path) -> bool:
    """Whether the tokenizer in `folder` ends texts with its EOS token. transformers 5.23 reads this from tokenizer.json
    alone, and neither reads nor saves add_eos_token next to that file."""
    eos = json_values.read(folder / TOKENIZER).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    processor = json_values.read_object(folder / "tokenizer.json").get("post_processor") or {}
    templates = [each["single"] for each in processor.get("processors", [processor]) if each.get("single")]
    return bool(eos) and any(template[-1].get("SpecialToken", {}).get("id") == eos for template in templates)


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template."""
    if (folder / "chat_template.jinja").exists():
        return True
    return bool(json_values.read(folder / TOKENIZER).get("chat_template"))


SYSTEM = '    {"role": "system", "content": '  # begins a line of the code


def public_code(model: TrainedModel) -> str:
    """The code without the system prompt of training, which is one line of it: a prompt may contain characters at which
    `splitlines` splits, such as U+2028, but no line feed."""
    return "\n".join(line for line in model.code.split("\n") if not line.startswith(SYSTEM))


def _chat_code(system: str, scores: bool) -> str:
    """A conversation as in training: without its system prompt, a model may generate something else. A reward model
    has learned to score a prompt with its completion."""
    return (SCORED if scores else CHAT).replace(SYSTEM_LINE, f"{SYSTEM}{literal(system)}}},\n" if system else "")


LOADING = """\
{imports}from transformers import {names}

folder = {folder}
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = {kind}.from_pretrained(folder, {options}{trust})
"""
TO_DEVICE = """\
inputs = inputs.to(model.device)
"""
SYSTEM_LINE = "    # system\n"
CHAT = f"""\
messages = [
{SYSTEM_LINE}    {{"role": "user", "content": "Hello!"}},
]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
"""
SCORED = f"""\
messages = [
{SYSTEM_LINE}    {{"role": "user", "content": "Hello!"}},
    {{"role": "assistant", "content": "Hello! How can I help you?"}},
]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
"""
PLAIN = """\
inputs = tokenizer("Once upon a time", return_tensors="pt")
"""
WITHOUT_EOS = """\
for name, values in inputs.items():  # without the EOS token that the tokenizer adds, which ends a text
    inputs[name] = values[:, :-1]
"""
GENERATE = """\
output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""
OWN_ENDS = """\
model.generation_config = GenerationConfig.from_pretrained(folder)
"""
SCORE = """\
print(model(**inputs).logits[0, 0].item())
"""
