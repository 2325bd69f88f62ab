"""What leaves the machine when a model is published: its files, with a model card and without any local path."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from backend import registry, wording
from backend.config import RunSpec
from backend.models import trained
from backend.models.spec import read_spec
from backend.paths import model_folder
from backend.publish import card, exports
from backend.registry.hub_models import is_hub_id
from backend.runs import BASE, CERTIFICATE, jobs, json_values
from backend.runs.folder import Run, RunError

README = "README.md"
# The files that transformers and peft load. All other files stay on this machine: checkpoints have optimizer states.
FILES = re.compile(r"[^/]+\.(safetensors|json|jinja|model|txt|py)|(adapter_model|pytorch_model)[^/]*\.bin")
TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
BINARY = (".safetensors", ".bin", ".model")  # all other files are text, such as a Modelfile, or begin with it: GGUF
METADATA_BYTES = 2**24  # of a GGUF file: its vocabulary has a few MiB
# A file -> the files that transformers 5.23 and peft 0.21 look for first, so that they would not load it.
LOADED_BEFORE = {
    "model.safetensors": ("adapter_config.json",),
    "model.safetensors.index.json": ("adapter_config.json", "model.safetensors"),
    "pytorch_model.bin": ("adapter_config.json", "model.safetensors", "model.safetensors.index.json"),
    "pytorch_model.bin.index.json": (
        "adapter_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    ),
    "adapter_model.bin": ("adapter_model.safetensors",),
}  # fmt: skip
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True)
class Request:
    """What to publish, and where. `step`: of a checkpoint, None for the final model; `merge`: the id of the job that
    merged the adapter, to publish the merged model; `exports`: the ids of the jobs that have exported GGUF files, or of
    one that has exported a quantized checkpoint, to publish these; either a `repository` of the Hub or an absolute
    `folder`; `public`: visibility of the repository; `license`: an identifier of the Hub, or ''; `base_model`: the Hub
    ID of the base model if the run does not know it."""

    step: int | None = None
    merge: str = ""
    exports: Sequence[str] = ()
    repository: str = ""
    folder: str = ""
    public: bool = False
    license: str = ""
    base_model: str = ""

    @property
    def destination(self) -> str:
        """The repository or the folder."""
        return self.repository or self.folder

    def as_json(self) -> dict[str, Any]:
        """For the job's file."""
        return asdict(self)

    def check(self) -> None:
        """Raise RunError for values that cannot be used."""
        if self.merge and self.exports:
            raise RunError("Choose one: the merged model, or exports.")
        if bool(self.repository) == bool(self.folder):
            raise RunError("Choose one destination: a repository of the Hugging Face Hub, or a folder.")
        if self.repository and not is_hub_id(self.repository):
            raise RunError(f"The repository {self.repository!r} must be named account/name or name.")
        if self.folder and not Path(self.folder).is_absolute():
            raise RunError(f"The folder {self.folder!r} must be an absolute path, such as /home/ada/my-model.")
        if self.folder and self.public:
            raise RunError("Only a repository can be public or private. Leave the visibility out for a folder.")
        if self.license and not LICENSE.fullmatch(self.license):
            raise RunError(
                f"The license {self.license!r} must be an identifier of the Hub, such as apache-2.0, mit or other."
            )
        if self.base_model and not is_hub_id(self.base_model):
            raise RunError(
                f"The base model {self.base_model!r} must be the ID of a model on the Hub: organization/name."
            )


@dataclass(frozen=True)
class PublishedFile:
    """A file with its name in the repository: a copy of `source`, or `text` if that is not None. `version`: size and
    time of the last change of `source`, or the hash of `text`; a retrained model has files of the same size."""

    name: str
    source: Path
    bytes: int
    version: str
    text: str | None = None

    @classmethod
    def copied(cls, name: str, source: Path) -> PublishedFile:
        """A copy of `source`. Raises OSError."""
        stat = source.stat()
        return cls(name, source, stat.st_size, f"{stat.st_size} {stat.st_mtime_ns}")

    @classmethod
    def written(cls, name: str, source: Path, text: str) -> PublishedFile:
        """A file with `text`, in place of `source`."""
        content = text.encode()
        return cls(name, source, len(content), hashlib.sha256(content).hexdigest(), text)


@dataclass(frozen=True)
class Contents:
    """The published `files`; `left_out`: files of the model's folder that are not published; `model`: what is
    published; `base_model`: its Hub ID, or ''."""

    files: tuple[PublishedFile, ...]
    left_out: tuple[str, ...]
    model: trained.TrainedModel
    base_model: str

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)

    def versions(self) -> dict[str, str]:
        """Name -> version."""
        return {file.name: file.version for file in self.files}

    def check_repository(self, repository: str, present: Collection[str]) -> None:
        """Raise RunError if the repository has files, with the names `present`, that stay there and would be loaded
        instead of the published weights."""
        own = self.versions()
        found = {name for each in own for name in LOADED_BEFORE.get(each, ()) if name in present and name not in own}
        if found:
            raise RunError(
                f"{repository} has {wording.names(sorted(found))}, which would stay there and be loaded instead of "
                "these weights. Choose another repository, or delete from it what belongs to the other model."
            )

    @property
    def card(self) -> str:
        """The text of the model card."""
        return next(file.text or "" for file in self.files if file.name == README)


def contents(run: Run, request: Request) -> Contents:
    """What a request publishes; changes nothing. Raises RunError if that is impossible, or would reveal a local
    path."""
    request.check()
    found = exports.find(run, request.step, request.exports)
    if found and found[0].kind == jobs.GGUF:
        return _gguf_contents(run, request, found)
    spec, model = read_spec(run), _model(run, request)
    base, is_of_weights = _base_model(run, request, spec, is_quantized=bool(request.exports))
    if model.base and not base:
        raise RunError(
            f"The adapter belongs to {model.base}, a model on this machine, so nobody else could load it. Enter the "
            "Hub ID of the base model (--base-model), or merge the adapter and publish the merged model."
        )
    names = {str(path.relative_to(model.folder)): path for path in sorted(model.folder.rglob("*")) if not path.is_dir()}
    kept = {name: path for name, path in names.items() if _is_published(name)}
    certificate = jobs.find(run, request.merge).result().get("certificate", {}) if request.merge else {}
    subject = card.Subject(request.destination, base, request.license, certificate, found, is_of_weights)
    return _with_card(run, spec, model, subject, kept, [name for name in names if name not in kept and name != README])


def _gguf_contents(run: Run, request: Request, found: Sequence[exports.Export]) -> Contents:
    """The files of GGUF exports. Raises RunError."""
    spec, model = read_spec(run), trained.at_step(run, request.step)
    assert model  # of verified exports
    base, is_of_weights = _base_model(run, request, spec, is_quantized=not found[0].is_adapter)
    kept, left_out = exports.public_files(found)
    listed = [*found, *exports.also_published(run, request.repository, found)]
    subject = card.Subject(request.destination, base, request.license, {}, listed, is_of_weights)
    return _with_card(run, spec, model, subject, kept, left_out)


def _base_model(run: Run, request: Request, spec: RunSpec, is_quantized: bool) -> tuple[str, bool]:
    """The Hub ID of the base model, '' if it is not known, and whether it is the repository of the full weights that
    were quantized."""
    source = exports.published_source(run, request.step, request.public) if is_quantized else ""
    base = request.base_model or source or _hub_id(spec)
    return base, bool(source) and base == source


def _with_card(
    run: Run, spec: RunSpec, model: trained.TrainedModel, subject: card.Subject, kept: Mapping[str, Path],
    left_out: Sequence[str],
) -> Contents:  # fmt: skip
    """The files `kept`, name -> file, as they are published, with their model card. Raises RunError for a link and for
    a local path."""
    if links := [path for path in kept.values() if path.is_symlink()]:
        raise RunError(f"{links[0]} is a symbolic link: replace it with the file to publish the model.")
    local = _local_bases(run, spec, model)
    published = [_published(name, path, local, subject.base_model) for name, path in kept.items()]
    text = card.write(run, spec, model, subject)
    published.append(PublishedFile.written(README, model.folder / README, text))
    paths = {str(run.path), *local}
    for file in published:
        _check_paths(file, paths)
    files = tuple(sorted(published, key=lambda file: file.name))
    return Contents(files, tuple(left_out), model, subject.base_model)


def _model(run: Run, request: Request) -> trained.TrainedModel:
    if request.exports:  # a quantized checkpoint
        quantized = trained.find(jobs.find(run, request.exports[0]))
        assert quantized  # it is verified
        return quantized
    if request.merge:
        model = trained.find(jobs.find(run, request.merge))
        if model is None:
            raise RunError("The merged model no longer exists. Merge the adapter again, then publish the result.")
        return model
    found = trained.at_step(run, request.step)
    if found is None:
        steps = ", ".join(str(model.step) for model in trained.models(run) if model.step is not None)
        others = f"Choose a checkpoint of step {steps}." if steps else "Let the run finish, or resume it."
        which = "final model" if request.step is None else f"checkpoint of step {request.step}"
        raise RunError(f"{run.id} has no {which} that can be loaded. {others}")
    if found.base and trained.is_residual(json_values.read(found.folder / trained.ADAPTER)):
        if request.step is None:  # LLaMA-Factory does not convert it
            raise RunError(
                "This adapter fits only the base weights as PiSSA has changed them, so others could not load it on the "
                "base model. Merge it, and publish the merged model."
            )
        raise RunError(
            "With PiSSA and OLoRA, a checkpoint fits only the base weights as the initialization has changed them, so "
            "others could not load it on the base model. Publish the final model, which is an ordinary adapter."
        )
    return found


def _hub_id(spec: RunSpec) -> str:
    """The Hub ID of the run's base model; '' if the run does not know it."""
    if spec.model.source == "hub":
        return spec.model.hub_id
    return registry.BUILTIN_MODELS[spec.model.builtin].hub_id if spec.model.source == "builtin" else ""


def _is_published(name: str) -> bool:
    return not trained.is_state(PurePath(name)) and bool(FILES.fullmatch(name) or TEMPLATES.fullmatch(name))


def _local_bases(run: Run, spec: RunSpec, model: trained.TrainedModel) -> set[str]:
    """Every way in which the files may name the base model by its folder."""
    names = {model.base, spec.model.path}
    if spec.model.source == "builtin":
        names.add(str(model_folder(spec.model.builtin)))
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # runs of earlier versions have no record
        names.add(str(json_values.read(run.path / BASE)["name"]))
    return {name for name in names if Path(name).is_absolute()}


# -- local paths -----------------------------------------------------------------------------------------------------


def _published(name: str, path: Path, local: Collection[str], base: str) -> PublishedFile:
    """A file of the model; in JSON, the folder of the base model is replaced by its Hub ID, or left out."""
    if path.suffix == ".json":
        try:
            before = json_values.read(path)
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read as JSON ({error}), so the model is not published.") from error
        after = _without_folder(before, local, base)
        if path.name == CERTIFICATE and isinstance(after, dict):
            after = exports.public_certificate(after)
        if name == trained.ADAPTER and isinstance(after, dict):
            if after.get("base_model_name_or_path") != base:
                after["revision"] = None  # of another repository
            after["base_model_name_or_path"] = base
        if after != before:
            text = json.dumps(after, indent=2, ensure_ascii=False) + "\n"
            return PublishedFile.written(name, path, text)
    return PublishedFile.copied(name, path)


def _without_folder(value: Any, local: Collection[str], base: str) -> Any:
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if base or not _is_in(part, local)}
        return {key: _without_folder(part, local, base) for key, part in kept.items()}
    if isinstance(value, list):
        return [_without_folder(part, local, base) for part in value]
    return base if _is_in(value, local) else value


def _is_in(value: Any, local: Collection[str]) -> bool:
    return isinstance(value, str) and value in local


def _check_paths(file: PublishedFile, paths: Collection[str]) -> None:
    """Raise RunError if the text of a file has one of these `paths`, or a path below the home folder."""
    is_gguf = file.name.endswith(".gguf")
    if file.name.endswith(BINARY):
        return
    try:
        text = _head(file.source) if is_gguf else file.text
        text = file.source.read_text("utf-8", "replace") if text is None else text
        if file.name.endswith(".json"):
            text = json.dumps(json.loads(text), ensure_ascii=False)  # without escapes, which can hide a path
    except (OSError, ValueError) as error:
        raise RunError(f"{file.source} cannot be read ({error}), so the model is not published.") from error
    for pattern in _patterns(paths):
        if found := pattern.search(text):
            shown = text[max(0, found.start() - 30) : found.end() + 30].replace("\n", " ")
            raise RunError(
                f"{file.source} contains a path of this machine, and would reveal it: {shown!r}. Remove the path from "
                "the file, then publish again."
            )


def _head(file: Path) -> str:
    """The metadata of a GGUF file, with some of its weights."""
    with file.open("rb") as opened:
        return opened.read(METADATA_BYTES).decode("utf-8", "replace")


def _patterns(paths: Collection[str]) -> Iterator[re.Pattern[str]]:
    for path in sorted(paths):
        yield re.compile(re.escape(json.dumps(path, ensure_ascii=False)[1:-1]))
    home = str(Path.home())
    if home != "/":  # a path below it only: a vocabulary may contain the folder's name alone, such as /root
        yield re.compile(re.escape(home) + r"/[\w.]")
