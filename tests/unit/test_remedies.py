"""Remedies of failed runs: each passes the checks, and the peaks are corrected by what the run needed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from failed_runs import done_run, failed_run, out_of_memory
from small import client

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import GIB, machines, probe
from backend.preflight import build_case, preflight
from backend.presets import read
from backend.rules import examine
from backend.rules.examples import LAPTOP, TWO_H100
from backend.runs import SPEC, device_memory, files
from backend.tasks import remedies
from backend.tasks.measured import MeasuredPeaks, measure
from webui.api.checking import form_values

ONE_GPU = machines()["1x80gb"]
# Estimated at less than the 80 GiB of the device.
LARGE = edit(read("lora-80gb"), {"train.per_device_train_batch_size": 4})
ONE_SMALL, EIGHT_GPUS = machines()["1x24gb"], machines()["8x80gb"]
ZERO3 = read("full-8b-zero3")
TINY = edit(RunSpec(), {"model.builtin": "tiny-llama"})


def find(run, machine):
    return remedies.find(run, machine, Path.cwd())


def errors(spec, machine):
    return {f.code for f in examine(build_case(spec, machine, Path.cwd())) if f.level == "error"}


def test_the_error_of_torch_is_read():
    found = device_memory.parse(out_of_memory(2.0, 76.0, 77.87))
    assert found.needed == round(78.5 * GIB) and found.others == 0
    assert device_memory.sentence(found) == (
        "The device ran out of memory: 2 GiB more were requested when this process had 76 GiB allocated, of 79.2 GiB "
        "in total."
    )
    shared = device_memory.parse(out_of_memory(2.0, 16.0, 17.5))
    assert device_memory.sentence(shared).endswith("in total. Other processes used 60.4 GiB.")
    npu = (
        "NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total capacity; 59.00 GiB already allocated)"
    )
    assert device_memory.parse(npu).needed == 59 * GIB + 20 * 2**20
    bare = device_memory.parse("RuntimeError: HIP out of memory.")
    assert bare.needed is None and device_memory.sentence(bare) == "The device ran out of memory."
    assert device_memory.parse("MPS backend out of memory") is None


def test_out_of_memory_is_corrected_by_what_the_run_needed(tmp_path):
    run = failed_run(tmp_path, LARGE, ONE_GPU, out_of_memory())
    report = preflight(LARGE, ONE_GPU, Path.cwd())
    assert report.can_run and report.estimate.fits, "the checks had not found it"
    found, measured = find(run, ONE_GPU), measure(run)
    assert measured.at_least and measured.ratio > 1.1
    assert found.where == "per device" and f"{measured.ratio:.2f} times the estimate of" in found.note
    assert found.fixes[0].safe and len(found.fixes) > 1
    for fix in found.fixes:
        changed = edit(LARGE, fix.patch)
        estimated = build_case(changed, ONE_GPU, Path.cwd()).estimate.device_bytes
        assert estimated < fix.peak <= report.estimate.capacity_bytes, fix
        assert not errors(changed, ONE_GPU), fix


def test_a_larger_need_leads_to_a_larger_change(tmp_path):
    little = find(failed_run(tmp_path, LARGE, ONE_GPU, out_of_memory(2.0, 76.0)), ONE_GPU)
    much = find(failed_run(tmp_path, LARGE, ONE_GPU, out_of_memory(80.0, 76.0)), ONE_GPU)
    assert little.fixes[0].peak / 80 / GIB <= 1 and much.fixes[0].peak / 80 / GIB <= 1
    assert little.fixes != much.fixes


def test_without_the_device_remedies_are_still_named(tmp_path):
    found = find(failed_run(tmp_path, LARGE, ONE_GPU, out_of_memory()), LAPTOP)
    assert found.fixes and not any(fix.peak for fix in found.fixes), "this machine would train on its CPU"


def test_host_memory_of_a_gpu_run(tmp_path):
    changes = {"method.kind": "full", "train.learning_rate": 2e-5, "parallel.strategy": "zero3"}
    changes |= {"parallel.offload_optimizer": "cpu", "launch.nproc_per_node": 2, "train.dataloader_num_workers": 4}
    spec = edit(LARGE, changes)
    machine = replace(TWO_H100, ram_bytes=400 * GIB, ram_free_bytes=400 * GIB)
    run = failed_run(tmp_path, spec, machine, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried")
    found = find(run, machine)
    now = preflight(spec, machine, Path.cwd()).estimate.host_bytes
    assert found.where == "host RAM" and found.fixes[0].patch == {"train.dataloader_num_workers": 0}
    assert len(found.fixes) > 1 and all(0 < fix.peak < now for fix in found.fixes[1:])


def test_host_memory_of_a_cpu_run(tmp_path):
    run = failed_run(tmp_path, RunSpec(), LAPTOP, "", exit_code=-9, oom_kills=1)
    found = find(run, LAPTOP)
    assert found.where == "per process" and found.fixes
    # The run needed what was free; a change that saves less than 5% of it does not help.
    assert all(fix.peak <= 0.95 * LAPTOP.ram_free_bytes for fix in found.fixes)
    unknown = failed_run(tmp_path, RunSpec(), LAPTOP, "", exit_code=-9)
    assert not find(unknown, LAPTOP).fixes, "nothing says that memory was short"


@pytest.mark.parametrize(
    ("changes", "error", "patch"),
    [
        (
            {"train.dataloader_num_workers": 2},
            "RuntimeError: DataLoader worker is killed by signal: Bus error. insufficient shared memory",
            {"train.dataloader_num_workers": 0},
        ),
        ({}, "OSError: [Errno 28] No space left on device: 'x'", {"save.total_limit": 1}),
        (
            {
                "parallel.strategy": "ddp",
                "launch.rendezvous": "static",
                "launch.master_port": 29555,
                "launch.master_addr": "10.0.0.1",
            },
            "torch.distributed.DistNetworkError: port: 29555 EADDRINUSE",
            {"launch.master_port": 0},
        ),
        (
            {"parallel.strategy": "ddp", "launch.nproc_per_node": 2, "parallel.ddp_timeout": 60},
            "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 60000ms for recv",
            {"parallel.ddp_timeout": 240},
        ),
        (
            {"train.learning_rate": 0.01},
            "backend.train.run_log.TrainError: Training diverged: the loss of steps 4 to 6 is NaN or infinite. Start a "
            "new run with a lower train.learning_rate",
            {"train.learning_rate": 0.002},
        ),
    ],
)
def test_other_failures(tmp_path, changes, error, patch):
    spec = edit(TINY, changes)
    assert not errors(spec, LAPTOP)
    found = find(failed_run(tmp_path, spec, LAPTOP, error), LAPTOP)
    assert found.fixes[0].patch == patch
    assert all(not errors(edit(spec, fix.patch), LAPTOP) for fix in found.fixes)


def test_nothing_but_a_lower_rate_helps_if_the_learning_rate_is_unusual(tmp_path):
    error = (
        "backend.train.run_log.TrainError: Training diverged: the loss of step 4 is NaN or infinite. Start a new run"
    )
    found = find(failed_run(tmp_path, edit(TINY, {"train.learning_rate": 10}), LAPTOP, error), LAPTOP)
    assert found.fixes and all("train.learning_rate" in fix.patch for fix in found.fixes)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_remedy_with_warmup_has_a_schedule_with_warmup(tmp_path, schedule):
    error = (
        "backend.train.run_log.TrainError: Training diverged: the loss of step 4 is NaN or infinite. Start a new run"
    )
    spec = edit(TINY, {"train.lr_scheduler_type": schedule, "train.warmup_steps": 0.0})
    found = find(failed_run(tmp_path, spec, LAPTOP, error), LAPTOP)
    (patch,) = (fix.patch for fix in found.fixes if "train.warmup_steps" in fix.patch)
    assert edit(spec, patch).train.lr_scheduler_type == ("cosine" if schedule == "cosine" else "constant_with_warmup")


def test_what_the_checks_find_is_fixed(tmp_path):
    spec = edit(TINY, {"precision.compute": "fp16"})
    assert errors(spec, LAPTOP)
    finding = next(f for f in examine(build_case(spec, LAPTOP, Path.cwd())) if f.level == "error")
    # As check_rules of backend/train/rule_check.py writes it.
    text = f"{', '.join(finding.fields)}: {finding.title}. {finding.message} [{finding.code}]"
    found = find(failed_run(tmp_path, spec, LAPTOP, f"backend.train.run_log.TrainError: {text}"), LAPTOP)
    assert found.fixes and not errors(edit(spec, found.fixes[0].patch), LAPTOP)


@pytest.mark.parametrize(
    "error",
    [
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
        "KeyError: 'answer'",
        "ValueError: x",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1",
        "backend.train.run_log.TrainError: The dataset has no examples.",
    ],
)
def test_errors_of_another_machine_have_nothing_to_do_with_the_failure(tmp_path, error):
    little_ram = replace(ONE_SMALL, ram_free_bytes=16 * GIB)
    assert errors(ZERO3, little_ram) == {"LCH002", "MEM003"}
    assert find(failed_run(tmp_path, ZERO3, EIGHT_GPUS, error), little_ram).fixes == ()


def test_an_error_about_the_options_of_the_failure_is_fixed(tmp_path):
    spec = edit(TINY, {"parallel.strategy": "ddp", "launch.nproc_per_node": 8})
    assert errors(spec, ONE_SMALL) == {"LCH002"}
    error = "backend.train.run_log.TrainError: launch.nproc_per_node: 8 processes need 8 devices, but torch sees 1."
    found = find(failed_run(tmp_path, spec, EIGHT_GPUS, error), ONE_SMALL)
    assert found.fixes and not errors(edit(spec, found.fixes[0].patch), ONE_SMALL)


@pytest.mark.parametrize("machine", [LAPTOP, ONE_GPU, ONE_SMALL, EIGHT_GPUS])
def test_a_remedy_of_zero3_needs_less_memory_than_the_run(tmp_path, machine):
    run = failed_run(tmp_path, ZERO3, EIGHT_GPUS, out_of_memory())
    found, kept = find(run, machine), run.estimate()
    assert found.fixes
    for fix in found.fixes:
        ratio = measure(run).ratio
        planned = build_case(edit(ZERO3, fix.patch), EIGHT_GPUS, Path.cwd()).estimate.device_bytes
        assert planned < kept["measured_bytes"] * ratio, fix
        assert fix.peak < kept["device_bytes"] * ratio, fix
        assert fix.patch.get("parallel.strategy") != "single", fix


def test_a_change_that_leads_to_an_error_is_left_out(tmp_path, monkeypatch):
    run = failed_run(tmp_path, TINY, LAPTOP, "OSError: [Errno 28] No space left on device: 'x'")
    wrong = remedies.Fix("fp16", {"precision.compute": "fp16"})
    monkeypatch.setitem(remedies.BY_KIND, "disk", lambda failed: [wrong])
    assert find(run, LAPTOP) == remedies.Remedies()


def test_runs_without_remedies(tmp_path):
    done = done_run(tmp_path, TINY, LAPTOP, 1.0)
    assert find(done, LAPTOP) == remedies.Remedies()
    unreadable = failed_run(tmp_path, TINY, LAPTOP, "OSError: [Errno 28] No space left on device")
    (unreadable.path / SPEC).write_text("model: [")
    assert find(unreadable, LAPTOP) == remedies.Remedies()


def test_show_and_page_name_the_remedies(tmp_path, capsys):
    run = failed_run(tmp_path, TINY, LAPTOP, "OSError: [Errno 28] No space left on device: 'x'")
    assert main(["show", run.id, "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    command = f"footplate run {run.path / SPEC} --set save.total_limit=1"
    assert text.index("The disk is full") < text.index("Traceback") < text.index(command)
    assert text.endswith(f"To resume it: footplate resume {run.path}\n")
    found = client(tmp_path).get(f"/api/runs/{run.id}/remedies").json()
    assert found["fixes"][0]["patch"] == {"save.total_limit": 1}
    assert found["fixes"][0]["diff"][0]["label"] == "Checkpoint limit"


# -- earlier runs ------------------------------------------------------------------------------------------------------


def test_the_newest_comparable_run_corrects_the_estimate(tmp_path):
    done_run(tmp_path, TINY, LAPTOP, 1.5, "a")
    newer = done_run(tmp_path, edit(TINY, {"train.seed": 7}), LAPTOP, 1.08, "b")
    done_run(tmp_path, edit(TINY, {"method.kind": "full"}), LAPTOP, 2.0, "c")
    failed_run(tmp_path, TINY, LAPTOP, "ValueError: x", "d")
    report = preflight(edit(TINY, {"data.max_length": 256}), LAPTOP, Path.cwd())
    found = MeasuredPeaks(tmp_path).latest(report)
    assert found.run == newer.id
    assert found.sentence == f"The last similar run ({newer.id}) used 1.08 times the estimated memory."
    assert found.as_json(report)["corrected_bytes"] == pytest.approx(1.08 * report.estimate.device_bytes)
    assert MeasuredPeaks(tmp_path).latest(preflight(edit(TINY, {"method.kind": "freeze"}), LAPTOP, Path.cwd())) is None
    assert MeasuredPeaks(tmp_path / "missing").latest(report) is None


def test_out_of_memory_corrects_the_next_estimate(tmp_path):
    run = failed_run(tmp_path, LARGE, ONE_GPU, out_of_memory())
    found = MeasuredPeaks(tmp_path).latest(preflight(LARGE, ONE_GPU, Path.cwd()))
    assert found.run == run.id and "needed at least 3.04 times the estimated memory" in found.sentence
    less = failed_run(tmp_path, LARGE, ONE_GPU, out_of_memory(0.1, 10.0))
    assert measure(less) is None, "it says nothing about the estimate: another process used the memory"


def test_few_files_are_read_in_a_folder_with_many_runs(tmp_path, monkeypatch):
    for number in range(1200):
        (tmp_path / f"2026-01-01_{number:06}_x").mkdir()
    report, peaks = preflight(TINY, LAPTOP, Path.cwd()), MeasuredPeaks(tmp_path)
    reads = []
    original = files.read_text
    monkeypatch.setattr(files, "read_text", lambda path, **options: reads.append(path) or original(path, **options))
    assert peaks.latest(report) is None and len(reads) == 400
    assert peaks.latest(report) is None and len(reads) == 400


def test_page_and_command_line_show_the_correction(tmp_path, capsys):
    run = done_run(tmp_path, TINY, probe(Path.cwd()), 1.5)
    body = {"values": form_values(TINY), "seq": 1}
    measured = client(tmp_path).post("/api/check", json=body).json()["memory"]["measured"]
    assert measured["run"] == run.id and measured["ratio"] == pytest.approx(1.5, rel=1e-6)
    assert main(["estimate", str(run.path / SPEC), "--runs", str(tmp_path)]) == 0
    assert f"({run.id}) used 1.50 times the estimated memory. Scaled by 1.50, this run" in capsys.readouterr().out
    assert main(["estimate", str(run.path / SPEC), "--json", "--runs", str(tmp_path / "none")]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] is None
