"""Small files that would take gigabytes or minutes: data files, hostfiles and lists of names have limits."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from small import client

from backend.config import RunSpec
from backend.config.options import SpecError, edit, parse
from backend.data import DataFileError, read_examples
from backend.inspect.data_files import inspect_data_files
from backend.launch.hostfile import HostfileError, included_slots, parse_hostfile
from backend.machine import Machine
from webui.api import checking
from webui.api.requests import ApiError

MIB = 2**20
MEASURE = """
import json, sys, time
from pathlib import Path
from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect.data_files import inspect_data_files
began = time.process_time()
spec = edit(RunSpec(), {"data.source": "files", "data.files": (sys.argv[1],), "data.validation": "none"})
facts = inspect_data_files(spec, Path("/"))
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps([[issue.message for issue in facts["data_issues"]], peak, time.process_time() - began]))
"""


def inspected(path):
    """(issues, peak MiB, CPU seconds) of an inspection in a process of its own, which is what the server would need."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["text", "list"])
def test_a_small_parquet_file_does_not_take_gigabytes(tmp_path, kind):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if kind == "text":
        values = pa.array(["x" * (300 * MIB)])
    else:
        values = pa.ListArray.from_arrays([0, 60_000_000], pa.nulls(60_000_000, pa.int8()))
    path = tmp_path / "bomb.parquet"
    parquet.write_table(
        pa.table({"text": values}), path, compression="zstd", use_dictionary=False, write_statistics=False
    )
    assert path.stat().st_size < 50_000
    issues, peak, seconds = inspected(path)
    assert peak < 600, "MiB"
    assert len(issues) == 1 and ("memory" in issues[0] or "row of more than 32 MiB" in issues[0])
    assert seconds < 10


def test_ordinary_parquet_is_read_by_the_process_with_limits_as_without(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    rows = [{"prompt": f"p{i}", "completion": "c", "n": i} for i in range(1000)]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert list(read_examples(path, in_server=True)) == list(read_examples(path)) == [*enumerate(rows, 1)]
    assert len(list(read_examples(path, 3, in_server=True))) == 3
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and nothing else")
    for in_server in (True, False):
        with pytest.raises(DataFileError, match="is not a valid Parquet file"):
            list(read_examples(tmp_path / "no.parquet", in_server=in_server))
    assert not [p for p in psutil.Process().children(recursive=True) if "parquet_rows" in " ".join(p.cmdline())]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_sparse_file_of_one_line_is_read_up_to_a_limit(tmp_path, suffix):
    path = tmp_path / f"data.{suffix}"
    with path.open("wb") as file:
        file.write(b'{"text": "' if suffix == "jsonl" else b'text\n"')
        file.truncate(2**30)
    issues, peak, seconds = inspected(path)
    assert len(issues) == 1 and "is longer than 64 MiB" in issues[0]
    assert peak < 800 and seconds < 10  # 1 GiB took 2.4 GB and 36 s


def test_a_json_file_that_is_too_large_to_parse_is_named(tmp_path):
    path = tmp_path / "data.json"
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(DataFileError, match=r"is too large: a \.json file of more than 2 GiB cannot be read"):
        list(read_examples(path))


def test_long_examples_are_not_read_fifty_at_a_time(tmp_path):
    path = tmp_path / "data.jsonl"
    line = json.dumps({"text": "x " * (8 * MIB)}) + "\n"
    path.write_text(line * 12)
    spec = edit(RunSpec(), {"data.source": "files", "data.files": (str(path),), "train.stage": "pretraining"})
    facts = inspect_data_files(spec, tmp_path)
    assert facts["num_checked"] < 8 and facts["num_examples"] >= 10 and not facts["counts_are_exact"]


@pytest.mark.parametrize("slots", ["15000000", "9" * 5000, "1025"])
def test_slots_of_a_host_have_a_limit(slots):
    with pytest.raises(HostfileError, match=r"gives worker-1 more than 1,024 slots"):
        parse_hostfile([f"worker-1 slots={slots}"])
    with pytest.raises(HostfileError):
        included_slots(["worker-1 slots=4"], f"worker-1:{slots}")
    assert len(parse_hostfile(["worker-1 slots=1024"])["worker-1"]) == 1024


def test_hostfiles_are_read_as_by_deepspeed():
    """deepspeed 0.19 launcher/runner.py: what follows the slots is ignored, and slots of a host replace all of them."""
    hosts = ["worker-1 slots=4 max_slots=8", "# the second rack", "worker-2 slots=2  # spare"]
    assert parse_hostfile(hosts) == {"worker-1": (0, 1, 2, 3), "worker-2": (0, 1)}
    assert included_slots(hosts, "worker-1@worker-1:1") == {"worker-1": (1,)}


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("lora.target_modules", " ".join(f"m{i}" for i in range(8000)), "at most 1,000 entries, but has 8,000"),
        ("lora.modules_to_save", " ".join(f"m{i}" for i in range(200_000)), "at most 1,000 entries"),
        ("train.optim_target_modules", "x" * 301, "at most 300 characters"),
        ("launch.devices", " ".join(map(str, range(2000))), "at most 1,024 entries"),
        ("launch.hostfile", "\n".join(f"w{i} slots=1" for i in range(10_001)), "at most 10,000 entries"),
        ("launch.include", "w@" * 50_001, "at most 100,000 characters"),
        ("data.system_prompt", "x" * 100_001, "at most 100,000 characters"),
        ("launch.env", "\n".join(f"A{i}=1" for i in range(1001)), "at most 1,000 entries"),
    ],
)
def test_every_list_and_text_has_a_limit(tmp_path, option, value, part):
    with client(tmp_path / "runs", detect_machine=lambda _: Machine(python="/bin/true")) as http:
        values = {
            "lora.targets": "custom", "train.optim": "galore_adamw", "train.optim_targets": "custom",
            "method.kind": "full" if option.startswith("train") else "lora", "parallel.strategy": "zero2",
            "launch.launcher": "deepspeed", "launch.rendezvous": "static", option: value,
        }  # fmt: skip
        began = time.process_time()
        report = http.post("/api/check", json={"values": values}).json()
        assert time.process_time() - began < 10
        assert [problem["field"] for problem in report["invalid"]] == [option]
        assert part in report["invalid"][0]["message"] and len(report["invalid"][0]["message"]) < 300


def test_the_longest_lists_are_checked_quickly(tmp_path):
    """All names and numbers differ, so that nothing is found twice."""
    names = " ".join(f"{i}.self_attn.q_proj_{i}" for i in range(1000))
    hosts = "\n".join(f"w{i} slots=8" for i in range(1000))
    values = {
        "lora.targets": "custom", "lora.target_modules": names, "lora.modules_to_save": names, "launch.hostfile": hosts,
        "launch.include": "@".join(f"w{i}:0,1,2,3,4,5,6,7" for i in range(1000)), "launch.launcher": "deepspeed",
        "parallel.strategy": "zero2", "launch.rendezvous": "static", "launch.nnodes": 128, "launch.nproc_per_node": 8,
    }  # fmt: skip
    with client(tmp_path / "runs", detect_machine=lambda _: Machine(python="/bin/true")) as http:
        http.post("/api/check", json={"values": {}})
        began = time.process_time()
        assert http.post("/api/check", json={"values": values}).status_code == 200
        assert time.process_time() - began < 20  # 5 s on an idle machine


@pytest.mark.parametrize("pattern", [r"([\w.]+)+!", r"(a|a|\w)*(\w*)*\.x", r".*.*.*.*.*.*.*!", r"(?:(?:\w+\.?)+)+$!"])
def test_a_regular_expression_cannot_stop_the_server(tmp_path, pattern):
    values = {
        "model.builtin": "tiny-llama", "method.kind": "full", "train.optim": "galore_adamw",
        "train.optim_targets": "custom", "train.optim_target_modules": pattern,
    }  # fmt: skip
    assert parse(values)
    with client(tmp_path / "runs", detect_machine=lambda _: Machine(python="/bin/true")) as http:
        began = time.process_time()
        assert http.post("/api/check", json={"values": values}).status_code == 200
        assert time.process_time() - began < 10  # this took hours


@pytest.mark.parametrize(
    "option", ["launch.extra_accelerate_config", "parallel.extra_config", "kubernetes.extra_pod_spec"]
)
@pytest.mark.parametrize(
    ("value", "part"),
    [
        ('{"a":' * 15_000 + "1" + "}" * 15_000, "nested too deep"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested in more than 32 levels"),
        ("[" * 40_000, "nested too deep"),
        ('{"a": ' + "9" * 50_000 + "}", "digits"),
    ],
)
def test_json_in_an_option_is_bounded(option, value, part):
    with pytest.raises(SpecError, match=part):
        parse({option: value})


def test_slow_checks_leave_threads_for_other_requests(tmp_path, monkeypatch):
    """FastAPI has 40 threads for endpoints; 60 checks that wait would occupy them all."""
    held, release = threading.Semaphore(0), threading.Event()

    def slow(*_, **__):
        held.release()
        release.wait(60)
        raise ApiError(418, "done")

    monkeypatch.setattr(checking, "run_preflight", slow)
    server = client(tmp_path / "runs", detect_machine=lambda _: Machine(python="/bin/true"))
    with server as http, ThreadPoolExecutor(60) as pool:
        try:
            checks = [pool.submit(http.post, "/api/check", json={"values": {}}) for _ in range(60)]
            assert held.acquire(timeout=60)
            time.sleep(1)  # the others have arrived
            began = time.monotonic()
            assert http.get("/api/presets").status_code == 200
            assert time.monotonic() - began < 30 and not release.is_set()
        finally:
            release.set()
        assert {check.result().status_code for check in checks} <= {418, 503}
