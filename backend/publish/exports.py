"""Publishing exports of a model: GGUF files, several in one repository, or one quantized checkpoint. Only exports that
have finished and were verified are published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from backend.models import gguf, quantized, trained
from backend.models.exports import Exports
from backend.runs import CERTIFICATE, jobs
from backend.runs.folder import Run, RunError
from backend.wording import data_size

KINDS: Mapping[str, Exports] = {jobs.GGUF: gguf.EXPORTS, jobs.QUANTIZE: quantized.CHECKPOINTS}
NAMES = {jobs.GGUF: "GGUF file", jobs.QUANTIZE: "quantized checkpoint"}
OF_RUN = ("outputs", "run", "merge")  # of a certificate: prompts and outputs of the run, and ids


@dataclass(frozen=True)
class Export:
    """A verified export: its job, kind (GGUF or QUANTIZE of jobs), format and certificate."""

    job: Run
    kind: str
    format: str
    certificate: Mapping[str, Any]

    @property
    def is_adapter(self) -> bool:
        """Whether it is a GGUF LoRA adapter, with its base model in a file of its own."""
        return self.format.startswith(gguf.ADAPTER)

    @property
    def label(self) -> str:
        """For users."""
        return quantized.FORMATS[self.format].label if self.kind == jobs.QUANTIZE else self.format

    def files(self) -> dict[str, Path]:
        """Name -> file of a GGUF export. Those that every format has get its name."""
        file = gguf.file_of(self.job)
        assert file
        named = {CERTIFICATE: f"certificate-{self.format}.json", gguf.MODELFILE: f"{gguf.MODELFILE}-{self.format}"}
        named[gguf.PRESET] = f"lm-studio-{self.format}.preset.json"
        return {named.get(name, name): file.parent / name for name in gguf.names(file)}


def find_named(run: Run, step: int | None, formats: Iterable[str]) -> tuple[str, ...]:
    """The ids of the jobs that have exported the model of this step in these formats. Raises RunError."""
    found, model = [], trained.at_step(run, step)
    for format in formats:
        kind = jobs.QUANTIZE if format in quantized.FORMATS else jobs.GGUF
        job = KINDS[kind].find(run, model, format) if model else None
        if not job:
            at = f" --step {step}" if step is not None else ""
            raise RunError(
                f"{run.id} has no export in the format {format}. Export it first: footplate export-model {run.id} "
                f"--format {format}{at}."
            )
        found.append(job.id)
    return tuple(found)


def find(run: Run, step: int | None, ids: Sequence[str]) -> list[Export]:
    """The exports with these ids, of the model of this step. Raises RunError, which names one that cannot be
    published."""
    found = [_verified(run, step, id) for id in ids]
    if len(found) > 1 and any(export.kind == jobs.QUANTIZE for export in found):
        raise RunError(
            "A quantized checkpoint needs a repository of its own. Publish one quantized checkpoint, or GGUF files."
        )
    if len({export.is_adapter for export in found}) > 1:
        raise RunError("GGUF LoRA adapters and whole models need different repositories. Publish one kind at a time.")
    if len({export.format for export in found}) < len(found):
        raise RunError("Two of these exports have the same format. Choose one of each format.")
    return found


def _verified(run: Run, step: int | None, id: str) -> Export:
    job = jobs.find(run, id)
    kind = str(job.about().get("kind"))
    if kind not in KINDS:
        raise RunError(f"{id} is not an export of a model.")
    own_step, format = KINDS[kind].request(job)
    name, certificate = f"The {NAMES[kind]} {format} ({id})", job.result().get("certificate") or {}
    if job.state != "done":
        raise RunError(f"{name} is not published: {job.summary()['sentence']}")
    if own_step != step:
        raise RunError(f"{name} is of another checkpoint of this run. Choose that checkpoint.")
    model = trained.at_step(run, step)
    if model is None or not KINDS[kind].is_current(job, model):
        raise RunError(f"{name} was deleted, or its model was trained again since. Export again.")
    if not str(certificate.get("status", "")).startswith("verified"):
        raise RunError(f"{name} was not verified, so it is not published. Export again.")
    return Export(job, kind, format, certificate)


def also_published(run: Run, repository: str, found: Sequence[Export]) -> list[Export]:
    """The GGUF exports that are in the repository already, since its card describes all of them; those of `found` are
    not among them."""
    known = {export.format: export for export in found}
    for job in jobs.find_all(run, jobs.PUBLISH):
        request = jobs.request(job.path, jobs.PUBLISH).get("request") or {}
        if not repository or request.get("repository") != repository or not job.result():
            continue
        for id in request.get("exports") or ():
            with suppress(RunError):  # it was deleted since
                export = _verified(run, request.get("step"), id)
                if export.kind == jobs.GGUF:
                    known.setdefault(export.format, export)
    return [export for export in known.values() if export not in found]


def public_files(exports: Sequence[Export]) -> tuple[dict[str, Path], list[str]]:
    """The files of GGUF exports, name -> file, and the names of those that stay here: Modelfile and preset with the
    system prompt of training. The certificate tells whether they have it: the training data may be gone by now."""
    kept: dict[str, Path] = {}
    private = []
    for export in exports:
        has_prompt = export.certificate.get(gguf.SYSTEM_PROMPT, True)
        for name, path in export.files().items():
            if has_prompt and path.name in (gguf.MODELFILE, gguf.PRESET):
                private.append(name)
            else:
                kept[name] = path
    return kept, private


def published_source(run: Run, step: int | None, public: bool) -> str:
    """The repository in which full weights of this model are published, which its quantizations name as their base
    model; '' if there is none. A public card does not name a private one."""
    for job in jobs.find_all(run, jobs.PUBLISH):
        request = jobs.request(job.path, jobs.PUBLISH).get("request") or {}
        repository = str(job.result().get("repository") or "")
        if not repository or request.get("exports") or request.get("step") != step:
            continue
        if public and not request.get("public"):
            continue
        model = trained.at_step(run, step)
        if request.get("merge") or (model and not model.base):
            return repository
    return ""


def public_certificate(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """A certificate without texts of the run, which may be those of its data."""
    return {key: value for key, value in certificate.items() if key not in OF_RUN}


# -- model card --------------------------------------------------------------------------------------------------------


def introduction(exports: Sequence[Export], of: str) -> str:
    """What is published; `of` names the model in Markdown."""
    first = exports[0]
    if first.kind == jobs.QUANTIZE:
        kind = quantized.FORMATS[first.format]
        return f"A quantized checkpoint ({kind.label}: {kind.about}) of {of}"
    formats = ", ".join(export.format for export in exports)
    if first.is_adapter:
        return f"A LoRA adapter in GGUF, with its base model ({formats}), for {of}"
    return f"GGUF files ({formats}) of {of}"


def use(exports: Sequence[Export], repository: str) -> str:
    """How llama.cpp loads GGUF files; `repository`: '' for a folder."""
    lines = [] if not repository else [f"hf download {repository} --local-dir {PurePath(repository).name}"]
    place = f"{PurePath(repository).name}/" if repository else ""
    for export in exports:
        names = [name for name in export.files() if name.endswith(".gguf")]
        whole = next(name for name in names if name == Path(str(export.job.result()["model"])).name)
        lora = [f"--lora {place}{name}" for name in names if name != whole]
        lines.append(" ".join([f"llama-server -m {place}{whole}", *lora]))
    return "```sh\n" + "\n".join(lines) + "\n```\n\nThe files have the chat template and the stop tokens of the model."


def requirement(export: Export) -> str:
    """What the program that loads a quantized checkpoint needs."""
    kind = quantized.FORMATS[export.format]
    return f"Loading it needs {kind.package} {kind.min_version} or later."


def verification(exports: Sequence[Export]) -> str:
    """What was compared, and how it ended."""
    if exports[0].kind == jobs.QUANTIZE:
        how, found = "The checkpoint was loaded by transformers in a new process", "trained_to_checkpoint"
    else:
        how, found = "Each file was loaded in llama.cpp", "trained_to_file"
    titles = ("Format", "Size", "KL divergence", "Same most likely next token", "Result")
    rows = [titles, ("---",) * len(titles)]
    for export in exports:
        values, about = export.certificate[found], export.certificate
        kl = f"{values['kl_mean']:.2g} (limit {about['max_kl_mean']:g})"
        same = f"{values['same_argmax']:.1%} of {values['positions']} positions"
        rows.append((export.label, data_size(_bytes(export)), kl, same, str(about["status"])))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    limits = [
        f"Limitation ({export.label}): {limit}" for export in exports for limit in export.certificate.get("limits", ())
    ]
    compared = f"{how}, and compared with the trained model in fp32. KL divergences are means in nats per token."
    return "\n\n".join([compared, table, *limits])


def _bytes(export: Export) -> int:
    if export.kind == jobs.GGUF:
        return sum(path.stat().st_size for name, path in export.files().items() if name.endswith(".gguf"))
    model = trained.find(export.job)
    return model.bytes if model else 0
