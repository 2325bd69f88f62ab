"""The options of a run that has trained."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from backend.config import RunSpec
from backend.config.options import SpecError, edit, effective
from backend.presets import read
from backend.runs import BASE, SPEC, json_values
from backend.runs.folder import Run, RunError

# Options for distributing, replacing and compiling layers in training do not change what one process computes.
OUTSIDE_TRAINING = {
    "parallel.strategy": "single", "train.use_liger_kernel": False, "train.use_unsloth": False,
    "train.torch_compile": False, "save.merge_adapter": False, "model.attn_implementation": "auto",
}  # fmt: skip


def read_spec(run: Run) -> RunSpec:
    """The options of the run. Raises RunError."""
    try:
        return _spec(run.path / SPEC, (run.path / SPEC).stat().st_mtime_ns)
    except OSError as error:
        raise RunError(f"{SPEC} of this run cannot be read: {error.strerror}.") from error
    except SpecError as error:
        raise RunError(f"{SPEC} of this run cannot be read: {error}.") from error


@lru_cache(maxsize=64)  # the page asks each second
def _spec(path: Path, changed: int) -> RunSpec:
    """`changed`: when the file was changed."""
    return effective(read(path))


def environment_of(run: Run) -> dict[str, str]:
    """The variables of launch.env, such as HF_HOME, for a process that uses the trained model: it has to find the base
    model where training found it. PYTHONPATH is Footplate's own. Raises RunError."""
    return {name: value for name, value in read_spec(run).launch.env.items() if name != "PYTHONPATH"}


def read_spec_outside_training(run: Run) -> RunSpec:
    """The options with which one process uses the trained model. The revision of a base model of the Hub is the commit
    that training has loaded: a branch may have a newer one. Raises RunError."""
    spec, recorded = read_spec(run), json_values.read_object(run.path / BASE)
    is_recorded = spec.model.source == "hub" and recorded.get("name") == spec.model.hub_id
    commit = str(recorded.get("commit") or "") if is_recorded else ""
    return edit(spec, {**OUTSIDE_TRAINING, **({"model.revision": commit} if commit else {})})
