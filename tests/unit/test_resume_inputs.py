"""A run whose input files are missing is not resumed: it would start, and a stopped run would become a failed one."""

import pytest
from failed_runs import ended, planted_run

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.runs import CHECKPOINTS, COMPLETE
from backend.runs.folder import Run, RunError
from backend.tasks.resume import resume


@pytest.fixture
def started(monkeypatch):
    """The runs that were started; none is, really."""
    runs = []
    monkeypatch.setattr(Run, "start", lambda run, *_: runs.append(run.id))
    return runs


def stopped(root, patch):
    run = planted_run(root, edit(RunSpec(), {"model.builtin": "tiny-llama", **patch}), probe(root), "stopped")
    (run.path / CHECKPOINTS / "checkpoint-10").mkdir(parents=True)
    for name in (COMPLETE, "trainer_state.json", "optimizer.pt", "adapter_config.json"):
        (run.path / CHECKPOINTS / "checkpoint-10" / name).touch()
    return ended(run, end="stopped", exit_code=0)


@pytest.mark.parametrize("option", ["data.files", "data.validation_files", "model.path"])
def test_a_missing_input_is_named(tmp_path, started, capsys, option):
    path = tmp_path / "input"
    path.write_text('{"text": "a"}\n')
    of = {
        "data.files": {"data.source": "files", option: [str(path)]},
        "data.validation_files": {"data.source": "files", "data.validation": "files", option: [str(path)]},
        "model.path": {"model.source": "path", option: str(path)},
    }
    run = stopped(tmp_path, of[option])
    resume(run)
    assert started == [run.id]
    path.unlink()
    with pytest.raises(RunError, match=f"Not resumed: .*{path}.* Put it back"):
        resume(run)
    assert main(["resume", str(run.path), "--from-scratch"]) != 0 and str(path) in capsys.readouterr().err
    assert started == [run.id] and run.state == "stopped"


def test_paths_of_a_cluster_are_not_looked_for_here(tmp_path, started):
    run = stopped(tmp_path, {"data.source": "files", "data.files": ["/shared/a.jsonl"], "launch.place": "slurm"})
    resume(run)
    assert started == [run.id]
