"""A checkpoint is loaded only if nobody else can have written it: its pickles run code."""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from privileges import needs_root
from torch.distributed import checkpoint as dcp

from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect.checkpoint import checkpoint_problem
from backend.runs import checkpoint_files, ownership
from backend.train import checkpoints
from backend.train.run_log import RunLog, TrainError

OTHER_USER = 65534
# The files of each kind of checkpoint that are pickles.
KINDS = {
    "ddp": ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "pytorch_model.bin"),
    "fsdp2": ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "optimizer_0/__0_0.distcp"),
    "fsdp1": ("optimizer.bin",),
    "zero2": ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"),
}
FILES = [(kind, name) for kind, names in KINDS.items() for name in names]


@pytest.fixture(autouse=True)
def others_can_reach_it(tmp_path: Path) -> None:
    """pytest's folders have mode 0700, which makes the modes in them irrelevant; with xdist there is one more."""
    temporary = Path(tempfile.gettempdir())
    for folder in (tmp_path, *tmp_path.parents):
        if folder == temporary:
            return
        folder.chmod(0o755)


def make_checkpoint(run: Path, kind: str) -> Path:
    folder = run / "checkpoints" / "checkpoint-5"
    for name in (*KINDS[kind], "trainer_state.json", "adapter_config.json", "optimizer.pt" if kind == "ddp" else "x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    checkpoints.mark_complete(folder)
    return folder


def problems(folder: Path, run: Path) -> tuple[str, str]:
    """What the check before the start says, and what the trainer says."""
    spec = edit(RunSpec(), {"save.resume_from": "path", "save.resume_path": str(folder)})
    try:
        checkpoints.at_path(str(folder))
    except TrainError as error:
        return checkpoint_problem(spec, run), str(error)
    return checkpoint_problem(spec, run), ""


@needs_root
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_every_file_must_belong_to_the_user(tmp_path: Path, kind: str, name: str) -> None:
    folder = make_checkpoint(tmp_path, kind)
    assert "belongs to the user" not in "".join(problems(folder, tmp_path))
    os.chown(folder / name, OTHER_USER, OTHER_USER)
    for said in problems(folder, tmp_path):
        assert f"{folder / name} belongs to the user" in said
    with pytest.raises(TrainError, match="belongs to the user"):
        checkpoints.latest(tmp_path, RunLog(tmp_path, 0))
    with pytest.raises(TrainError, match="belongs to the user"):
        checkpoints.check_owner(tmp_path, folder)


@pytest.mark.parametrize("mode", [0o666, 0o602])
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_no_file_may_be_writable_by_others(tmp_path: Path, kind: str, name: str, mode: int) -> None:
    folder = make_checkpoint(tmp_path, kind)
    (folder / name).chmod(mode)
    for said in problems(folder, tmp_path):
        assert f"{folder / name} can be changed by all users" in said
    folder.chmod(0o700)
    assert "can be changed" not in "".join(problems(folder, tmp_path)), "nobody else can enter the folder"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_folders_on_the_path_are_checked(tmp_path: Path, level: int) -> None:
    folder = make_checkpoint(tmp_path / "run", "fsdp2")
    changed = (folder, *folder.parents)[level]
    changed.chmod(0o777)
    assert f"{changed} can be changed by all users" in problems(folder, tmp_path)[0]
    changed.chmod(0o1777)
    assert bool(level) == (problems(folder, tmp_path)[1] == ""), "as in /tmp, others cannot replace its entries"
    changed.chmod(0o755)
    assert not checkpoint_files.problem(folder)


@needs_root
@pytest.mark.parametrize("level", [0, 1, 2])
def test_folders_of_another_user_on_the_path(tmp_path: Path, level: int) -> None:
    folder = make_checkpoint(tmp_path / "run", "fsdp2")
    changed = (folder, *folder.parents)[level]
    os.chown(changed, OTHER_USER, OTHER_USER)
    assert f"{changed} belongs to the user" in problems(folder, tmp_path)[0]


def test_a_group_that_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has a group of the same name, new files are often writable by it."""
    folder = make_checkpoint(tmp_path, "zero2")
    (folder / "latest").chmod(0o664)
    monkeypatch.setattr(ownership, "_is_private_group", lambda gid: True)
    assert not checkpoint_files.problem(folder)
    monkeypatch.setattr(ownership, "_is_private_group", lambda gid: False)
    assert "can be changed by the group" in checkpoint_files.problem(folder)


@needs_root
def test_links_are_followed(tmp_path: Path) -> None:
    folder, elsewhere = make_checkpoint(tmp_path, "fsdp2"), tmp_path / "elsewhere"
    (folder / "optimizer_0").rename(elsewhere)
    (folder / "optimizer_0").symlink_to(elsewhere)
    assert not checkpoint_files.problem(folder)
    os.chown(elsewhere / ".metadata", OTHER_USER, OTHER_USER)
    assert "belongs to the user" in checkpoint_files.problem(folder)
    os.chown(elsewhere / ".metadata", 0, 0)
    elsewhere.chmod(0o777)
    assert "can be changed by" in checkpoint_files.problem(folder)
    elsewhere.chmod(0o755)
    (folder / "loop").symlink_to(folder)
    assert not checkpoint_files.problem(folder)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    assert "cannot be read" in checkpoint_files.problem(folder)


def test_checkpoints_of_a_run_where_modes_are_not_kept(tmp_path: Path) -> None:
    """As on a Windows drive in WSL: every file looks writable by everyone, that of run.sh too."""
    folder = make_checkpoint(tmp_path / "run", "ddp")
    (folder / "optimizer.pt").chmod(0o777)
    checkpoints.check_owner(tmp_path / "run", folder)
    (tmp_path / "run").chmod(0o700)
    checkpoints.check_owner(tmp_path / "run", folder)


class Code:
    """A pickle that creates a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@needs_root
def test_metadata_of_a_sharded_checkpoint_runs_code(tmp_path: Path) -> None:
    """What the checks prevent: torch unpickles .metadata before it reads any weight."""
    folder, marker = make_checkpoint(tmp_path, "fsdp2"), tmp_path / "code-ran"
    metadata = folder / "optimizer_0" / ".metadata"
    metadata.write_bytes(pickle.dumps(Code(marker)))
    with suppress(AttributeError):  # of what it gets instead of metadata
        dcp.FileSystemReader(folder / "optimizer_0").read_metadata()
    assert marker.exists(), "torch no longer unpickles .metadata: docs/security.md says so"
    os.chown(metadata, OTHER_USER, OTHER_USER)
    assert all("belongs to the user" in said for said in problems(folder, tmp_path))
