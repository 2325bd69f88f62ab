"""Launchers, devices and nodes: how torch, accelerate and DeepSpeed treat their arguments and environment."""

from __future__ import annotations

import base64
import pickle
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.launcher.runner as runner
import psutil
import pytest
import torch
import torch.distributed.run as torchrun
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, MegatronLMPlugin
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from fork_server import free_port
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from backend.config.processes import DEFAULT_PORT
from backend.launch.hostfile import included_slots, parse_hostfile
from backend.rules.launch import ENGINE_VARIABLE_PREFIXES
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")


@cites("LCH002", "LCH005")
def test_more_processes_than_devices_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def device_of(rank: int) -> int:
        state = SimpleNamespace(device=None, distributed_type=DistributedType.MULTI_GPU, local_process_index=rank)
        PartialState.set_device(state)
        return int(state.device.index)

    assert [device_of(rank) for rank in range(4)] == [0, 1, 0, 1]


@cites("LCH003", "LCH004")
@pytest.mark.parametrize(("ids", "seen"), [("0,1", 2), ("0,9,1", 1), ("9,0", 0), ("0,0", 0), ("1,0,1", 0)])
def test_visible_devices_end_at_the_first_unknown_id(ids: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    assert torch.cuda._device_count_nvml() == seen


@cites("LCH018")
def test_deepspeed_takes_devices_by_number() -> None:
    assert runner.parse_inclusion_exclusion({"localhost": 2}, "localhost:1", "") == {"localhost": [1]}
    with pytest.raises(ValueError, match="MIG-7"):
        runner.parse_inclusion_exclusion({"localhost": 2}, "localhost:MIG-7", "")


VARIABLES: dict[str, tuple[str, str, Any]] = {
    "ACCELERATE_": ("MIXED_PRECISION", "bf16", lambda: Accelerator(cpu=True).mixed_precision),
    "FSDP_": ("STATE_DICT_TYPE", "FULL_STATE_DICT", lambda: plugin().state_dict_type.name),
    "PARALLELISM_CONFIG_": ("DP_REPLICATE_SIZE", "3", lambda: str(ParallelismConfig().dp_replicate_size)),
    "MEGATRON_LM_": ("TP_DEGREE", "3", lambda: str(MegatronLMPlugin().tp_degree)),
    "PET_": ("MAX_RESTARTS", "7", lambda: str(parsed("x.py").max_restarts)),
}


def plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2)


@cites("LCH012")
@pytest.mark.parametrize("prefix", ENGINE_VARIABLE_PREFIXES)
def test_libraries_read_these_environment_variables(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value, read = VARIABLES[prefix]
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")
    assert read() != value
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv(prefix + name, value)
    assert read() == value


@cites("HW003")
def test_npu_needs_torch_npu() -> None:
    assert "torch_npu" in sys.modules or not hasattr(torch, "npu")


@cites("HW006")
def test_torch_build_without_a_device_type_finds_no_device() -> None:
    builds = {torch.cuda: bool(torch.version.cuda or torch.version.hip), torch.xpu: torch.xpu._is_compiled()}
    others = [module for module, built in builds.items() if not built]
    assert others
    assert not any(module.is_available() for module in others)


def parsed(*arguments: str) -> Any:
    return torchrun.parse_args([*arguments])


def config(*arguments: str) -> LaunchConfig:
    return torchrun.config_from_args(parsed(*arguments, "x.py"))[0]


@cites("NOD001")
def test_node_rank_is_not_checked() -> None:
    found = config("--nnodes=2", "--node-rank=2", "--master-addr=127.0.0.1")
    assert (found.max_nodes, found.rdzv_configs["rank"]) == (2, 2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = StaticTCPRendezvous("127.0.0.1", store.port, 2, 2, "run", 5)
    assert rendezvous.next_rendezvous().rank == 2


@cites("NOD002")
def test_rendezvous_endpoint_needs_a_host() -> None:
    assert config("--nnodes=2", "--master-addr=10.0.0.1", "--master-port=29511").rdzv_endpoint == "10.0.0.1:29511"
    nowhere = config("--nnodes=2", "--master-addr=", "--master-port=29511").rdzv_endpoint
    with pytest.raises(ValueError, match="hostname of the rendezvous endpoint ':29511' must be"):
        parse_rendezvous_endpoint(nowhere, -1)


@cites("NOD003")
def test_loopback_matches_every_node() -> None:
    """Each node then starts its own store, or waits for one that does not exist."""
    assert all(_matches_machine_hostname(name) for name in ("localhost", "127.0.0.1"))
    with pytest.raises(torch.distributed.DistNetworkError, match="timed out"):
        TCPStore("127.0.0.1", free_port(), is_master=False, timeout=timedelta(seconds=0.5))


@cites("NOD004")
def test_min_nodes_above_max_nodes_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"min_nodes must be > 0 and <= max_nodes, got min_nodes=3, max_nodes=2"):
        config("--nnodes=3:2")


@cites("NOD005")
@pytest.mark.parametrize("option", ["nodes", "elastic"])
def test_other_launchers_are_not_elastic(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert config("--nnodes=1:2").max_nodes == 2
    arguments_of = {
        "nodes": (["--num_machines=1:2"], ["--num_nodes=1:2"]),
        "elastic": (["--min_nodes=1"], ["--elastic_training"]),
    }
    for parse, arguments in zip(
        (launch_command_parser().parse_args, runner.parse_args), arguments_of[option], strict=True
    ):
        with pytest.raises(SystemExit):
            parse([*arguments, "x.py"])
        assert "error: " in capsys.readouterr().err


@cites("NOD008")
def test_failed_rank_restarts_as_a_new_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'a').write(f'{os.getpid()} ');"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )
    config = LaunchConfig(
        1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=1, monitor_interval=0.05
    )
    elastic_launch(config, sys.executable)("-c", code, str(tmp_path / "pids"))
    pids = (tmp_path / "pids").read_text().split()
    assert len(set(pids)) == 2


HOSTFILE = ["worker-1 slots=2", "worker-2 slots=2"]


@cites("NOD009")
@pytest.mark.parametrize("lines", [["worker-1 slots=2", "worker-2"], ["worker-1 slots=2"] * 2, ["worker-1 slots=x"]])
def test_invalid_hostfiles_are_refused(lines: list[str]) -> None:
    assert {name: tuple(range(n)) for name, n in runner._parse_hostfile(HOSTFILE).items()} == parse_hostfile(HOSTFILE)
    with pytest.raises(ValueError, match="unable to proceed with launching"):
        runner._parse_hostfile(lines)


def active(include: str = "") -> dict[str, tuple[int, ...]]:
    found = runner.parse_inclusion_exclusion(runner._parse_hostfile(HOSTFILE), include, "")
    return {name: tuple(slots) for name, slots in found.items()}


@cites("NOD010")
def test_include_outside_the_hostfile_is_refused() -> None:
    with pytest.raises(ValueError, match="'worker-3' not found in hostfile"):
        active("worker-1@worker-3")
    with pytest.raises(ValueError, match="No slot '9' specified on host 'worker-1'"):
        active("worker-1:9")


@cites("NOD011", "NOD012")
@pytest.mark.parametrize("include", ["", "worker-1@worker-2", "worker-1:0@worker-2", "worker-2:1"])
def test_include_selects_hosts_and_slots(include: str) -> None:
    assert active(include) == included_slots(HOSTFILE, include)


@cites("NOD014")
def test_deepspeed_overwrites_visible_devices() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1,0"}
    CUDA_Accelerator().set_visible_devices_envs(environment, [0, 1])
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"


@cites("NOD015")
def test_master_port_must_be_free() -> None:
    """The default port is that of DeepSpeed's launcher."""
    assert runner.parse_args(["x.py"]).master_port == DEFAULT_PORT
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(torch.distributed.DistNetworkError, match="EADDRINUSE"):
            TCPStore("127.0.0.1", other.getsockname()[1], is_master=True, wait_for_workers=False)


@cites("NOD016", "NOD017")
def test_store_is_open_and_the_elastic_rendezvous_unpickles_it() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == store.port] == ["::"]
    rendezvous = C10dRendezvousBackend(store, "run")
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    written = _RendezvousState()
    written.round = 77
    other.set("torch.rendezvous.run", base64.b64encode(pickle.dumps(written)))
    settings = RendezvousSettings("run", 1, 1, RendezvousTimeout(), timedelta(seconds=5), 3)
    read = _BackendRendezvousStateHolder(rendezvous, settings)
    read.sync()
    assert read.state.round == 77


SHARED = """
import torch
tensor = torch.ones(8)
tensor.share_memory_()
print([line.split()[-2] for line in open("/proc/self/maps") if "/dev/shm/torch" in line])
"""


@cites("HW009")
def test_tensors_are_shared_through_dev_shm() -> None:
    """As DataLoader workers do with each batch."""
    found = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True)
    assert "/dev/shm/torch" in found.stdout
