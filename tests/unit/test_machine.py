"""The machine: detection of this one, and machines described in YAML."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from backend.config.options import SpecError
from backend.machine import (
    GIB,
    Gpu,
    Machine,
    describe,
    description,
    detection,
    machine_from_mapping,
    machines,
    parse,
    probe,
    read,
)
from backend.machine.keys import GPU_KEYS, KEYS

TWO = parse("gpus: [{name: H100, count: 2}]\nnvlink: true")
MIXED = parse(
    "name: mixed\nnodes: 2\nnvlink: false\ngpus: [{name: H100, count: 2}, {name: X9, memory_gib: 12.5, free_gib: 10}]\n"
    "shm_gib: 0.0625\nhas_libaio: false\ndriver_version: '550.54'\nversions: {torch: 2.13.0}\ncpu_bf16: true\ncores: 3"
)


def test_probe_finds_this_machine(tmp_path: Path) -> None:
    found = probe(tmp_path / "not" / "there" / "yet")
    assert found.cores >= 1
    assert found.ram_bytes >= found.ram_free_bytes > 0
    assert found.disk_free_bytes > 0
    assert Path(found.python).exists()
    assert "torch" in found.versions
    assert "wandb" not in found.versions or found.versions["wandb"]
    assert (found.device == "cpu") == (not found.gpus)


def test_a_missing_compiler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert probe(tmp_path).has_cpp_compiler
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not probe(tmp_path).has_cpp_compiler


def test_triton_needs_a_c_compiler_or_a_cached_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    installed = [True]
    monkeypatch.setattr(detection.importlib.util, "find_spec", lambda name: installed[0] or None)
    monkeypatch.setenv("CC", sys.executable)
    assert probe(tmp_path).triton_can_compile
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not probe(tmp_path).triton_can_compile
    installed[0] = False
    assert probe(tmp_path).triton_can_compile, "Triton is not installed"
    installed[0] = True
    built = tmp_path / "X7C" / "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    built.parent.mkdir()
    built.touch()
    assert probe(tmp_path).triton_can_compile


@pytest.mark.parametrize(
    ("setting", "ids"),
    [
        (None, [0, 1, 2]),
        ("2,1", [2, 1]),
        ("1,7,0", [1]),  # as in CUDA, the list ends at the first unknown device
        ("", []),
        ("-1", []),
        ("GPU-b", [1]),
        ("0.0,0.1,2.0", [0, 2]),  # tiles
        ("MIG-1234", [0, 1, 2]),
    ],
)
def test_visible_devices(setting: str | None, ids: list[int]) -> None:
    gpus = tuple(Gpu(i, "X9", GIB, GIB, (9, 0), uuid=f"GPU-{name}") for i, name in enumerate("abc"))
    assert [gpu.id for gpu in detection.visible_gpus(gpus, setting)] == ids


def test_describe() -> None:
    assert describe(Machine(cores=2, ram_bytes=24 * GIB)) == "2 cores, 24 GiB, no GPU"
    assert describe(Machine(cores=1, ram_bytes=8 * GIB)) == "1 core, 8 GiB, no GPU"
    assert describe(parse("gpus: [{name: H100, count: 8}]")) == "described machine: 8 x H100 80GB"
    one = Machine(device="cuda", gpus=(Gpu(0, "A100-SXM4-40GB", 40 * GIB, 40 * GIB, (8, 0)),), nodes=2)
    assert describe(one) == "2 nodes of A100-SXM4-40GB"


def test_file_describes_a_cluster() -> None:
    found = parse(
        "name: lab\nnodes: 2\nram_gib: 512\ncores: 96\ndisk_gib: 100\n"
        "gpus:\n- {name: H100 SXM, count: 2}\n- {name: X9, memory_gib: 12.5, free_gib: 10, capability: 8.6}\n"
        "versions: {torch: 2.13.0}\n"
    )
    assert (found.device, found.nodes, found.cores, found.name) == ("cuda", 2, 96, "lab")
    assert [g.id for g in found.gpus] == [0, 1, 2]
    assert found.gpus[0].capability == (9, 0)
    assert found.gpus[1].total_bytes == 80 * GIB
    assert (found.gpus[2].total_bytes, found.gpus[2].free_bytes) == (int(12.5 * GIB), 10 * GIB)
    assert found.gpus[2].capability == (8, 6)
    assert found.versions == {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("device: cuda", "gpus"),
        ("device: cpu\ngpus: [{name: H100}]", "device"),
        ("device: tpu", "device"),
        ("gpus: [{name: Mystery}]", "gpus.0.memory_gib"),
        ("gpus: [{name: X9 0GB}]", "gpus.0.memory_gib"),
        ("gpus: 8", "gpus"),
        ("gpus: [8]", "gpus.0"),
        ("gpus: [{name: H100, size: 3}]", "gpus.0.size"),
        ("gpus: [{name: H100, count: 0}]", "gpus.0.count"),
        ("gpus: [{name: H100, count: 1000000000}]", "gpus.0.count"),
        ("gpus: [{name: H100, count: 64}, {name: H200}]", "gpus"),
        ("gpus: [{name: H100}, {name: H100, capability: nine}]", "gpus.1.capability"),
        ("gpus: [{name: H100, memory_gib: -80}]", "gpus.0.memory_gib"),
        ("gpus: [{name: H100, memory_gib: .nan}]", "gpus.0.memory_gib"),
        ("gpus: [{name: H100, memory_gib: 143771}]", "gpus.0.memory_gib"),  # MiB
        ("gpus: [{name: H100, free_gib: 81}]", "gpus.0.free_gib"),
        ("nodes: 1000000000", "nodes"),
        ("driver_version: latest", "driver_version"),
        ("versions: {torch: latest}", "versions"),
        ("cpu_bf16: perhaps", "cpu_bf16"),
        ('name: "two\\nlines"', "name"),
        ("cores: 0", "cores"),
        ("cores: true", "cores"),
        ("ram_gib: -3", "ram_gib"),
        ("ram_gib: .inf", "ram_gib"),
        ("colour: red", "colour"),
        ("versions: [torch]", "versions"),
        ("- 1", ""),
        ("a: [", ""),
    ],
)
def test_invalid_machine_files_name_the_key(text: str, field: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(text)
    assert error.value.problems[0].field == field


def test_every_problem_of_a_description_is_reported() -> None:
    with pytest.raises(SpecError) as error:
        parse("gpus: [{name: H100, count: 0}, {name: X9}]\ncores: 0\ncolour: red")
    assert {p.field for p in error.value.problems} == {"gpus.0.count", "gpus.1.memory_gib", "cores", "colour"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ('{"name": "lab", "gpus": [{"name": "H1', "invalid JSON: line 1"),
        ("name: lab\ngpus: [{name: H100", "invalid YAML: line 2"),
        ("footplate: command not found", "footplate: unknown key"),
        ("bash: footplate", "bash: unknown key"),
        ("NVIDIA H200, 143771 MiB", "it has no keys"),
        ("+----+\n| NVIDIA-SMI 550.54  Driver Version: 550.54 |\n|  0  NVIDIA H200   Off |", "table of nvidia-smi"),
        ("name: lab\nsockets: 2", "sockets: unknown key; .*newer version of Footplate"),
    ],
)
def test_a_text_that_is_no_description_is_explained(text: str, part: str) -> None:
    with pytest.raises(SpecError, match=part):
        parse(text)


def test_a_size_in_the_name_of_a_gpu_comes_before_the_usual_one() -> None:
    assert [g.total_bytes // GIB for g in parse("gpus: [{name: A100 40GB}, {name: A100}]").gpus] == [40, 80]


def test_every_field_of_a_machine_can_be_described() -> None:
    derived = {"ram_free_bytes", "lost_gpus"}  # all of the RAM, and none
    assert {f.name for f in fields(Machine)} - derived == {key.field for key in KEYS if key.field}
    of_gpu = {"id", "nvlink_peers", "processes", "uuid", "only_by_uuid"}  # from the entry's place, `nvlink`, and none
    assert {f.name for f in fields(Gpu)} - of_gpu == {key.field for key in GPU_KEYS if key.field}


@pytest.mark.parametrize("machine", [*machines().values(), MIXED], ids=lambda machine: machine.name)
def test_a_printed_description_is_that_machine(machine: Machine) -> None:
    assert parse(yaml.safe_dump(description(machine))) == machine


def test_the_probed_machine_can_be_described(tmp_path: Path) -> None:
    here = replace(probe(tmp_path), name="here")
    found = parse(yaml.safe_dump(description(here)))
    rounded = ("ram_bytes", "disk_free_bytes", "shm_free_bytes")
    for name in {f.name for f in fields(Machine)} - {*rounded, "ram_free_bytes", "gpus", "lost_gpus"}:
        assert getattr(found, name) == getattr(here, name), name
    assert all(0 <= (getattr(here, n) or 0) - (getattr(found, n) or 0) < GIB / 9_999 for n in rounded)


def test_gpus_of_one_model_are_one_entry_with_the_least_free_memory() -> None:
    busy = replace(TWO, gpus=(replace(TWO.gpus[0], free_bytes=70 * GIB), replace(TWO.gpus[1], nvlink_peers=())))
    entry = {"name": "H100", "count": 2, "memory_gib": 80, "free_gib": 70, "capability": "9.0"}
    assert (description(busy)["gpus"], description(busy)["nvlink"]) == ([entry], False)


def test_a_form_has_text_for_every_kind() -> None:
    gpu = {"name": "X9", "count": "2", "memory_gib": "12.5", "free_gib": "", "capability": "8.6"}
    form = {
        "name": "lab",
        "nvlink": "true",
        "cores": "",
        "gpus": [gpu],
        "versions": "torch==2.13.0\n",
        "ram_gib": "1e2",
    }
    yaml_text = "name: lab\nnvlink: true\nram_gib: 100\nversions: {torch: 2.13.0}\n"
    assert machine_from_mapping(form) == parse(
        f"{yaml_text}gpus: [{{name: X9, count: 2, memory_gib: 12.5, capability: 8.6}}]"
    )
    for wrong in ("NaN", "inf", "-5", "141,5", "1e999", "0"):
        with pytest.raises(SpecError, match=r"gpus\.0\.memory_gib: must be a number of GiB"):
            machine_from_mapping({"gpus": [{**gpu, "memory_gib": wrong}]})


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        read(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("cores: none")
    with pytest.raises(SpecError, match=r"bad\.yaml"):
        read(tmp_path / "bad.yaml")


NPU = """
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 90.4        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3345 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 91.0        47                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          60000/ 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
"""


def test_machines_are_found_by_name() -> None:
    found = machines()
    order = list(found)
    assert (order[0], order[-1]) == ("laptop", "2x8x80gb")
    assert read("1x24gb") == found["1x24gb"]
    with pytest.raises(SpecError, match=r"no such file and no such machine .*1x24gb"):
        read("24gb")


def test_vendor_tools_are_read() -> None:
    first, second = detection.parse_npu(NPU)
    assert (first.id, first.name, first.total_bytes) == (0, "Ascend 910B3", 65536 * 2**20)
    assert second.free_bytes == 5536 * 2**20
    assert detection.parse_npu("") == ()
    xpu = '{"device_list": [{"device_id": 0, "device_name": "Max", "memory_physical_size_byte": "68719476736"}]}'
    assert detection.parse_xpu(xpu) == (Gpu(0, "Max", 64 * GIB, 64 * GIB),)
    assert detection.parse_xpu("no json") == ()


class NoPermission(ValueError):
    """NVML's error for a GPU that a container may not use."""


def nvml(**changes: Any) -> SimpleNamespace:
    """A driver without parts of GPUs, processes and errors, unless `changes` has others."""
    usual = {
        "NVMLError": ValueError,
        "NVMLError_NotSupported": NotImplementedError,
        "NVMLError_NoPermission": NoPermission,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMigMode": lambda handle: (0, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
    }
    return SimpleNamespace(**{**usual, **changes})


def test_nvml_reports_nvlink_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs: NVLink connects the first two, and this process computes on the third."""
    driver = nvml(
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetName=lambda handle: "NVIDIA RTX A6000",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=48 * GIB, free=47 * GIB),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 6),
        nvmlDeviceGetP2PStatus=lambda one, other, index: 0 if index == 2 and {one, other} == {0, 1} else 3,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=os.getpid())] if handle == 2 else [],
    )
    monkeypatch.setattr(detection, "pynvml", driver)
    (first, second, third), _ = detection._nvidia()
    assert (first.name, first.capability, first.free_bytes) == ("RTX A6000", (8, 6), 47 * GIB)
    assert (first.nvlink_peers, second.nvlink_peers, third.nvlink_peers) == ((1,), (0,), ())
    assert first.processes == ()
    assert f"({os.getpid()})" in third.processes[0]


@pytest.mark.parametrize("query", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
@pytest.mark.parametrize(
    ("error", "lost"), [(ValueError("GPU is lost"), {1: "GPU is lost"}), (NoPermission(), {})], ids=["lost", "denied"]
)
def test_a_lost_gpu_does_not_hide_the_others(
    query: str, error: ValueError, lost: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs would train on the CPU. The others are selected by UUID, because CUDA may give them other numbers."""

    def ask(handle: int) -> Any:
        if handle == 1:
            raise error
        return handle if query == "nvmlDeviceGetHandleByIndex" else SimpleNamespace(total=80 * GIB, free=80 * GIB)

    usual = {
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * GIB, free=80 * GIB),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0,
    }
    monkeypatch.setattr(detection, "pynvml", nvml(**{**usual, query: ask}))
    for setting, uuids in ((None, ["GPU-0", "GPU-2"]), ("1,2", ["GPU-2"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if setting and lost:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        family, found, missing = detection._accelerators()
        assert (family, missing) == ("cuda", lost)
        assert [gpu.visible_as for gpu in found] == (uuids if lost else ["GPU-0", "GPU-2"])
    assert found[-1].nvlink_peers == (0,)


def test_a_gpu_that_shares_the_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML does not support the question on DGX Spark, whose runs would train on the CPU."""

    class NotSupported(ValueError):
        pass

    def no_memory(handle: int) -> None:
        raise NotSupported

    driver = nvml(
        NVMLError_NotSupported=NotSupported,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetName=lambda handle: "NVIDIA GB10",
        nvmlDeviceGetMemoryInfo=no_memory,
        nvmlDeviceGetMigMode=no_memory,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (12, 1),
    )
    monkeypatch.setattr(detection, "pynvml", driver)
    monkeypatch.setattr(detection, "_ram", lambda: (120 * GIB, 110 * GIB))
    (found,), _ = detection._nvidia()
    assert (found.name, found.total_bytes, found.free_bytes) == ("GB10", 120 * GIB, 110 * GIB)


def test_gpus_that_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, NVML does not tell the memory of the whole GPU, and runs would train on the CPU."""

    def part(handle: str, number: int) -> str:
        if number == 1 or number > 2:
            raise ValueError("not found")
        return f"MIG-{handle}{number}"

    def memory(handle: str) -> SimpleNamespace:
        if not handle.startswith("MIG-"):
            raise ValueError("insufficient permissions")
        return SimpleNamespace(total=10 * GIB, free=9 * GIB)

    driver = nvml(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: "ab"[index],
        nvmlDeviceGetName=lambda handle: f"NVIDIA A100-SXM4-80GB{' MIG 1g.10gb' if 'MIG' in handle else ''}",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 0),
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetMigMode=lambda handle: (1, 1),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=part,
    )
    monkeypatch.setattr(detection, "pynvml", driver)
    found, _ = detection._nvidia()
    assert [(gpu.id, gpu.uuid) for gpu in found] == [(0, "MIG-a0"), (0, "MIG-a2"), (1, "MIG-b0"), (1, "MIG-b2")]
    assert (found[0].name, found[0].total_bytes) == ("A100-SXM4-80GB MIG 1g.10gb", 10 * GIB)
    for setting, uuid in ((None, "MIG-a0"), ("1", "MIG-b0"), ("MIG-a2,MIG-b0", "MIG-a2"), ("MIG-GPU-a/1/0", "MIG-a0")):
        (chosen,) = detection.visible_gpus(found, setting)  # a process can use only one
        assert chosen.uuid == chosen.visible_as == uuid
    assert detection.visible_gpus(found, "") == ()


def test_nvlink_of_a_described_machine() -> None:
    joined, apart, unknown = (
        parse(f"gpus: [{{name: H100, count: 2}}]{said}").gpus for said in ("\nnvlink: true", "\nnvlink: false", "")
    )
    assert [gpu.nvlink_peers for gpu in (*joined, *apart, *unknown)] == [(1,), (0,), (), (), None, None]
    with pytest.raises(SpecError, match="nvlink: must be true or false, but is 900"):
        parse("gpus: [{name: H100}]\nnvlink: 900")


def test_amd_gpus_are_read_from_sys(tmp_path: Path) -> None:
    for index, total in ((10, 64 * GIB), (9, 192 * GIB), (0, GIB // 2)):
        card = tmp_path / f"card{index}" / "device"
        card.mkdir(parents=True)
        (card / "mem_info_vram_total").write_text(f"{total}\n")
        (card / "mem_info_vram_used").write_text("1024\n")
    (tmp_path / "card9" / "device" / "product_name").write_text("MI300X\n")
    (tmp_path / "card9" / "device" / "unique_id").write_text("00beefdeadbeefab\n")
    first, second = detection._amd(tmp_path)
    assert first == Gpu(0, "MI300X", 192 * GIB, 192 * GIB - 1024, uuid="GPU-00beefdeadbeefab")
    assert (second.id, second.total_bytes) == (1, 64 * GIB), "card10 comes after card9"


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, ["a0", "b1", "c2", "d3"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ["d3", "b1"]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, ["c2"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["c0", "d1"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-DD,1", "HIP_VISIBLE_DEVICES": "1"}, ["b1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0"}, ["c0"]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_the_variables_of_rocm(variables: dict[str, str], seen: list[str]) -> None:
    gpus = tuple(Gpu(i, name, 64 * GIB, 64 * GIB, uuid=f"GPU-{name * 16}") for i, name in enumerate("abcd"))
    assert [f"{gpu.name}{gpu.id}" for gpu in detection.visible_amd_gpus(gpus, variables)] == seen


def test_container_limits_apply(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB // 4}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 8}\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert detection._ram(tmp_path) == (GIB // 4, GIB // 8)
    assert detection._cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert detection._ram(tmp_path)[0] > GIB // 4
    assert detection._cores(tmp_path) >= 1


def test_cached_files_of_a_container_are_free_memory(tmp_path: Path) -> None:
    """After a download they fill the container, and the kernel drops them when a run needs memory."""
    limit, used, cached = GIB // 4, GIB // 4 - 4096, GIB // 8
    kinds = f"anon 1\nfile {GIB}\ninactive_file {cached - 4096}\nactive_file 4096"
    for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", kinds)):
        (tmp_path / name).write_text(f"{text}\n")
    assert detection._ram(tmp_path) == (limit, limit - used + cached)


@pytest.mark.parametrize(
    ("own", "place", "memory", "cpu"),
    [
        ("0::/system.slice/job_7/step_0\n", "system.slice/job_7", ("memory.max", "memory.current"), {"cpu.max": "1 1"}),
        (
            "9:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n0::/\n",
            "{}/slurm/job_7",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            {"cpu.cfs_quota_us": "1", "cpu.cfs_period_us": "1"},
        ),
    ],
)
def test_limits_of_jobs_and_users_apply(
    tmp_path: Path, own: str, place: str, memory: tuple[str, str], cpu: dict[str, str]
) -> None:
    """Of a job in a cluster, or a service: their groups are below the first one, and the limit may be above its own."""
    (tmp_path / "own").write_text(own)
    whole = detection._ram(tmp_path / "none", tmp_path / "own"), detection._cores(tmp_path / "none", tmp_path / "own")
    files = {"memory": dict(zip(memory, (str(GIB // 4), str(GIB // 8)), strict=True)), "cpu": cpu}
    for controller, texts in files.items():
        folder = tmp_path / "groups" / place.format(controller)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")
    assert detection._ram(tmp_path / "groups", tmp_path / "own") == (GIB // 4, GIB // 8)
    assert detection._cores(tmp_path / "groups", tmp_path / "own") == 1
    (tmp_path / "own").write_text("0::/other\n4:memory,cpu:/other\n")
    assert detection._ram(tmp_path / "groups", tmp_path / "own")[0] == whole[0][0]
    assert detection._cores(tmp_path / "groups", tmp_path / "own") == whole[1]


def test_container_limits_of_older_hosts_apply(tmp_path: Path) -> None:
    """Version 1 of control groups."""
    for name in ("memory", "cpu"):
        (tmp_path / name).mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{GIB // 4}\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{GIB // 8}\n")
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 4096\n")
    assert detection._ram(tmp_path) == (GIB // 4, GIB // 8 + 4096)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, is_limited in ((-1, False), (100_000, True)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert (detection._cores(tmp_path) == 1) == is_limited or detection._cores(tmp_path / "none") == 1
