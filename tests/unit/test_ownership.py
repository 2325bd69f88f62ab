"""Runs folders that other users can change: the page does not start there, and no run does. Tests with a second user
need root."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest
from failed_runs import NOW
from privileges import needs_root

from backend.runs import Plan, ownership
from backend.runs.folder import Run, RunError
from webui import __main__ as entry
from webui.login import SESSIONS, Login, Sessions, load_or_create_key

NOBODY = 65534


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "runs"
    folder.mkdir(parents=True)
    return folder


def refusal(runs: Path) -> str:
    """Why the page does not start; the same problem keeps runs from starting."""
    with pytest.raises(entry.StartupError) as refused:
        entry._runs_folder(runs)
    with pytest.raises(RunError, match="Nothing was started"):
        Run.create(runs, "x", Plan(("true",)), NOW)
    return str(refused.value)


@needs_root
def test_a_folder_that_another_user_prepared_does_not_bypass_the_login(runs: Path) -> None:
    """The other user makes the folder with a key and a session, and waits until somebody serves runs from there."""
    session = Login("their-token", runs, is_token=True).sessions.create()
    for path in (runs, *runs.rglob("*")):
        path.chmod(0o644 if path.is_file() else 0o777)
        os.chown(path, NOBODY, NOBODY)
    os.chown(runs, 0, 0)
    assert "can be changed by all users (mode 0777)" in refusal(runs)
    runs.chmod(0o755)  # as the message says; what was prepared is still there
    assert "nobody (UID 65534)" in refusal(runs)
    with pytest.raises(OSError, match="who could log in with it"):
        Login("a-token", runs, is_token=True)
    (runs / ".key").unlink()
    assert ".sessions" in refusal(runs)
    (runs / SESSIONS).rename(runs / "old")
    assert entry._runs_folder(runs) == runs
    assert not Login("a-token", runs, is_token=True).sessions.is_valid(session)


@needs_root
def test_root_does_not_use_the_folder_of_another_user(runs: Path) -> None:
    os.chown(runs, NOBODY, NOBODY)
    sentence = refusal(runs)
    assert f"{runs} belongs to the user nobody (UID 65534)" in sentence and "another folder with --runs" in sentence
    os.chown(runs, 0, 0)
    for name in (".drafts", ".index.json", ".keys"):
        (runs / name).mkdir()
        os.chown(runs / name, NOBODY, NOBODY)
        assert f"Delete {name}" in refusal(runs)
        (runs / name).rmdir()
    assert not ownership.folder_problem(runs)


@needs_root
def test_the_owner_of_a_folder_above_could_replace_the_runs_folder(runs: Path) -> None:
    os.chown(runs.parent, NOBODY, NOBODY)
    assert f"{runs.parent} belongs to the user nobody" in refusal(runs)


@pytest.mark.parametrize(("mode", "shared"), [(0o700, False), (0o755, False), (0o777, True), (0o1777, True)])
def test_modes_of_the_folder(runs: Path, mode: int, shared: bool) -> None:
    runs.chmod(mode)
    if shared:
        assert f"`chmod go-w {runs}`" in refusal(runs)
    else:
        assert entry._runs_folder(runs) == runs


def test_folders_above(runs: Path, tmp_path: Path) -> None:
    """Anyone can rename what is in a folder that all may write to, unless it is sticky, as /tmp is. A group is
    trusted there, since projects of a team are in such folders. Links are resolved once, at the start."""
    runs.parent.chmod(0o777)
    assert "could replace the runs folder" in refusal(runs)
    (tmp_path / "link").symlink_to(runs)
    assert "could replace the runs folder" in refusal(tmp_path / "link")
    for mode in (0o1777, 0o775):
        runs.parent.chmod(mode)
        assert entry._runs_folder(tmp_path / "link") == runs


def test_groups(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """umask 002 is usual where every user has a group of its own."""
    runs.chmod(0o775)
    name = pwd.getpwuid(os.getuid()).pw_name
    for group, members, private in ((name, [], True), (name, [name, "bob"], False), ("users", [], False)):
        found = grp.struct_group((group, "x", os.getgid(), members))
        monkeypatch.setattr(grp, "getgrgid", lambda _, found=found: found)
        if private:
            assert entry._runs_folder(runs) == runs
        else:
            assert f"can be changed by the group {group} (mode 0775)" in refusal(runs)


@pytest.mark.parametrize("kind", ["readable", "link", "folder", "pipe"])
def test_a_key_that_others_may_know_is_refused(runs: Path, kind: str) -> None:
    key = runs / ".key"
    if kind == "readable":
        key.write_bytes(b"k" * 32)
        key.chmod(0o640)
    elif kind == "link":
        (runs / "other").write_bytes(b"k" * 32)
        (runs / "other").chmod(0o600)
        key.symlink_to(runs / "other")
    elif kind == "folder":
        key.mkdir(mode=0o700)
    else:
        os.mkfifo(key, 0o600)
    with pytest.raises(OSError, match=r"\.key"):
        load_or_create_key(runs)
    with pytest.raises(OSError, match=r"\.key"):
        Sessions(runs / SESSIONS, load_or_create_key(runs), float).create()


@needs_root
def test_a_container_without_root_shows_the_owner_of_the_system_as_nobody(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.chown(runs.parent, NOBODY, NOBODY)
    monkeypatch.setattr(ownership, "unmapped_uid", lambda: {NOBODY})
    assert entry._runs_folder(runs) == runs
