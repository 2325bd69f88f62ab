"""The model card of a published model: only what the run's files say, without paths of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import PurePath
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import by_name, get, shown
from backend.models import system_prompt, trained
from backend.models.python_text import literal
from backend.publish import exports
from backend.publish.exports import Export
from backend.runs import BASE, CERTIFICATE, METRICS, json_values
from backend.runs.folder import Run
from backend.runs.jobs import GGUF
from backend.runs.metrics import Point, read_points
from backend.runs.search import SCORES
from backend.wording import counted

HUB = "https://huggingface.co"
# The options that a reader of the card needs to assess or repeat the training; none of them can contain a path.
OPTIONS = (
    "method.quantization", "lora.r", "lora.alpha", "lora.dropout", "lora.targets", "lora.use_dora", "lora.use_rslora",
    "lora.init", "train.learning_rate", "train.lr_scheduler_type", "train.warmup_steps", "train.optim",
    "train.weight_decay", "data.max_length", "data.packing", "data.loss_on", "train.seed",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What the card adds to the run: the repository or the folder, the Hub ID of the base model and the license, each
    or '', the certificate of a merged model, empty for others, and exports, if these are published; `is_of_weights`:
    the base model is the repository of the weights that were exported."""

    destination: str
    base_model: str
    license: str
    certificate: Mapping[str, Any]
    exports: Sequence[Export] = ()
    is_of_weights: bool = False

    @property
    def compared(self) -> Mapping[str, Any]:
        """The certificate of what is published, or of one of several exports."""
        return self.exports[0].certificate if self.exports else self.certificate

    @property
    def is_gguf(self) -> bool:
        """Whether GGUF files are published."""
        return bool(self.exports) and self.exports[0].kind == GGUF


def write(run: Run, spec: RunSpec, model: trained.TrainedModel, subject: Subject) -> str:
    """The text of README.md: metadata for the Hub, then sections in Markdown."""
    name = PurePath(subject.destination).name
    sections = {
        "Use": _use(run, spec, model, subject),
        "Training data": _data(run, spec),
        "Training": _training(run, spec, model, subject),
        "Results": _results(run, model, subject),
        "Verification": exports.verification(subject.exports) if subject.exports else "",
        "Merge": "" if subject.exports else _merge(spec, model, subject.certificate),
        "Environment": _environment(run, model, subject),
    }
    parts = [f"---\n{_metadata(spec, model, subject)}\n---", f"# {name}", _introduction(spec, model, subject)]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def _metadata(spec: RunSpec, model: trained.TrainedModel, subject: Subject) -> str:
    # The import takes a tenth of a second, and only publishing needs it.
    from huggingface_hub import ModelCardData  # noqa: PLC0415

    is_adapter = subject.exports[0].is_adapter if subject.exports else bool(model.base)
    relation = "adapter" if is_adapter else "quantized" if subject.is_of_weights else "finetune"
    tags = (spec.train.stage, "lora" if spec.method.kind == "lora" else "", "gguf" if subject.is_gguf else "")
    is_reward = registry.STAGES[spec.train.stage].is_reward_model
    hub_ids = [source.hub_id for source in spec.data.datasets if source.source == "hub"]
    header = ModelCardData(
        base_model=subject.base_model or None,
        base_model_relation=relation if subject.base_model else None,
        library_name=None if subject.is_gguf else "peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=[*filter(None, tags), "footplate"],
        license=subject.license or None,
        datasets=list(dict.fromkeys(hub_ids)) or None,
    )
    return str(header.to_yaml())


def _introduction(spec: RunSpec, model: trained.TrainedModel, subject: Subject) -> str:
    name = subject.base_model
    base = f"[{name}]({HUB}/{name})" if name else "a base model without a Hub ID"
    if subject.exports:
        of = base if subject.is_of_weights or subject.exports[0].is_adapter else f"a model fine-tuned from {base}"
        what = exports.introduction(subject.exports, of)
    elif model.base:
        what = f"A LoRA adapter for {base}"
    elif spec.method.kind == "lora":
        what = f"A LoRA adapter merged into {base}: full weights"
    else:
        what = f"Full weights, fine-tuned from {base}"
    trainer = "LLaMA-Factory, started by Footplate" if spec.launch.trainer == "llamafactory" else "Footplate"
    return f"{what}. Trained with {trainer}."


def _use(run: Run, spec: RunSpec, model: trained.TrainedModel, subject: Subject) -> str:
    notes = []
    if spec.model.source == "builtin" and (difference := registry.BUILTIN_MODELS[spec.model.builtin].difference):
        notes.append(difference)
        if model.base and not subject.exports:
            notes.append("The adapter's outputs on the original weights were not compared with those of training.")
    if subject.exports and not subject.is_gguf:
        notes.append(exports.requirement(subject.exports[0]))
    if model.base and not subject.is_gguf and (bits := registry.QUANTIZATIONS[spec.method.quantization].bits):
        notes.append(
            f"The adapter was trained on a base model quantized to {bits:g} bits ({spec.method.quantization}). The "
            "code loads the base model without quantization, so outputs can differ from those of training."
        )
    if system_prompt.of_training(spec):
        notes.append(
            "The training examples have a system prompt, which is not published; without it, outputs can differ from "
            "what the model has learned."
        )
    commit = json_values.read_object(run.path / BASE).get("commit")
    if model.base and commit:
        notes.append(f"The base model had the commit `{commit}`.")
    if subject.is_gguf:
        repository = "" if subject.destination.startswith("/") else subject.destination
        return "\n\n".join([exports.use(subject.exports, repository), *([" ".join(notes)] if notes else [])])
    name = subject.destination if not subject.destination.startswith("/") else PurePath(subject.destination).name
    marked = trained.public_code(model).replace(literal(str(model.folder)), "\0")
    code = re.sub(r"\bfolder\b", "model_id", marked).replace("\0", literal(name))
    return "\n\n".join([f"```python\n{code.strip()}\n```", *([" ".join(notes)] if notes else [])])


def _data(run: Run, spec: RunSpec) -> str:
    lines = [f"- {_dataset(source)}" for source in spec.data.datasets]
    resolved = run.resolved()
    train, evaluated = resolved.get("num_train_examples"), resolved.get("num_eval_examples")
    counts = [counted(train, "training example")] if isinstance(train, int) and train else []
    counts += [counted(evaluated, "validation example")] if isinstance(evaluated, int) and evaluated else []
    return "\n".join(lines) + (f"\n\n{' and '.join(counts)}, counted before training." if counts else "")


def _dataset(source: Any) -> str:
    if source.source == "hub":
        details = [source.hub_config, f"split {source.hub_split}" if source.hub_split else ""]
        more = ", ".join(detail for detail in details if detail)
        return f"[{source.hub_id}]({HUB}/datasets/{source.hub_id})" + (f", {more}" if more else "")
    if source.source == "builtin":
        dataset = registry.DATASETS[source.builtin]
        return f"{dataset.label}, a demo dataset of Footplate: {dataset.help}"
    names = ", ".join(f"`{PurePath(file).name}`" for file in source.files)
    return f"Files that are not published: {names}"


def _training(run: Run, spec: RunSpec, model: trained.TrainedModel, subject: Subject) -> str:
    resolved, step = run.resolved(), _step(run, model, subject)
    tokens = max((p["tokens"] for p in _points(run, step) if isinstance(p.get("tokens"), int)), default=None)
    rows: dict[str, Any] = {
        "Stage": registry.STAGES[spec.train.stage].label,
        "Method": registry.METHODS[spec.method.kind].label,
        "Steps": f"{step:,}" if step else None,
        "Tokens": f"{tokens:,}" if tokens else None,
        "Global batch size": counted(size, "example") if (size := resolved.get("global_batch_size")) else None,
        "Compute dtype": resolved.get("compute_dtype"),
        "Strategy": resolved.get("strategy"),
    }
    values = {key: _value(get(spec, key)) for key in OPTIONS if shown(spec, by_name()[key])}
    rows |= {f"`{key}`": value for key, value in values.items()}
    return _table(("Setting", "Value"), [(name, value) for name, value in rows.items() if value not in (None, "")])


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else ""  # most switches are off
    return f"{value:g}" if isinstance(value, float) else str(value)


def _results(run: Run, model: trained.TrainedModel, subject: Subject) -> str:
    """Losses of the published step, and generation scores, which belong to the final model of the run."""
    step, result = _step(run, model, subject), run.result()
    points = _points(run, step)
    losses = {
        "Training loss at the last logged step": _last(points, "loss"),
        "Validation loss": _last([p for p in points if p.get("step") == step], "eval_loss"),
    }
    rows = [(name, f"{value:.4g}") for name, value in losses.items() if value is not None]
    parts = [_table(("Loss", "Value"), rows)] if rows else []
    count = len(result.get("samples") or ())
    if count and not _is_checkpoint(model, subject):
        scores = [
            (name, _score(result.get(f"{key}_before")), _score(result.get(f"{key}_after")))
            for key, name in SCORES.items()
            if _is_number(result.get(f"{key}_after"))
        ]
        table = _table(
            (f"Score on {counted(count, 'validation example')}", "Before training", "After training"), scores
        )
        parts += [table] if scores else []
    return "\n\n".join(parts)


def _merge(spec: RunSpec, model: trained.TrainedModel, certificate: Mapping[str, Any]) -> str:
    if not certificate:
        if spec.method.kind != "lora" or model.base:
            return ""
        return (
            "The adapter was merged at the end of the run. The merged model was not compared with the base model and "
            "the adapter."
        )
    saved, change = certificate["adapter_to_saved"], certificate["adapter_to_base"]
    if certificate.get("is_reward_model"):
        texts, most = saved["positions"], saved["kl_max"]
        compared = f"The scores of {texts} texts differ from the unmerged model's by at most {most:.2g}."
    else:
        compared = (
            f"KL divergence from the base model with the adapter: {saved['kl_mean']:.2g} nats per token (for "
            f"comparison, the base model without the adapter: {change['kl_mean']:.2g}). Same most likely next token: "
            f"{saved['same_argmax']:.1%} of {saved['positions']} positions."
        )
    limits = "".join(f"\n\nLimitation: {limit}" for limit in certificate.get("limits", ()))
    return (
        f"{str(certificate['status']).capitalize()}: the merged model was loaded from its files "
        f"({certificate['dtype']}) and compared with the base model and the adapter. {compared} "
        f"`{CERTIFICATE}` has all figures.{limits}"
    )


def _environment(run: Run, model: trained.TrainedModel, subject: Subject) -> str:
    """Versions that the model's files record, and the devices of the run, without names of hosts."""
    versions = {
        "peft": json_values.read_object(model.folder / trained.ADAPTER).get("peft_version"),
        "transformers": json_values.read_object(model.folder / trained.CONFIG).get("transformers_version")
        or json_values.read_object(model.folder / trained.GENERATION).get("transformers_version"),
    }
    versions |= {f"{name} (export)": each for name, each in subject.compared.get("versions", {}).items()}
    resolved = run.resolved()
    device, count, nodes = (resolved.get(key) for key in ("device", "world_size", "nnodes"))
    rows = [(name, version) for name, version in versions.items() if version]
    if device and count:
        family = registry.DEVICES[device].label if device in registry.DEVICES else device
        on_nodes = f" on {counted(nodes, 'node')}" if isinstance(nodes, int) and nodes > 1 else ""
        rows.append(("Hardware", f"{family}, {counted(count, 'process')}{on_nodes}"))
    rows.append(("Model card", f"Footplate {metadata.version('footplate')}"))
    return _table(("Component", "Value"), rows)


# -- parts -----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def _is_checkpoint(model: trained.TrainedModel, subject: Subject) -> bool:
    return model.step is not None or subject.compared.get("step") is not None


def _step(run: Run, model: trained.TrainedModel, subject: Subject) -> int | None:
    """The step of the published weights; None if the run did not record it."""
    own = subject.compared.get("step") if subject.compared else model.step
    result = run.result()
    found = own or result.get("model_step") or result.get("steps")
    return found if isinstance(found, int) else None


def _points(run: Run, step: int | None) -> list[Point]:
    """The metrics until the published step."""
    try:
        points = read_points(run.path / METRICS)
    except OSError:
        return []
    return [point for point in points if step is None or int(point.get("step") or 0) <= step]


def _last(points: Sequence[Point], name: str) -> float | None:
    return next((float(p[name]) for p in reversed(points) if _is_number(p.get(name))), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _score(value: Any) -> str:
    return f"{value:.1%}" if _is_number(value) else "not run"
