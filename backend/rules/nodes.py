"""Rules about several nodes: the rendezvous, elastic runs, DeepSpeed's hostfile and the master port."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import replace

from backend.config.processes import DEFAULT_PORT
from backend.inspect.ports import FIRST_PORT
from backend.launch.hostfile import HostfileError, Slots, include_argument, included_slots, parse_hostfile
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, set_to, warning
from backend.rules.common_fixes import DDP
from backend.rules.examples import DEMO, LAPTOP, TWO_H100
from backend.rules.launch import VISIBLE_DEVICES_VARIABLES, without_variables
from backend.rules.requirements import missing_packages, without
from backend.wording import counted

STATIC_SPEC = {"parallel.strategy": "ddp", "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
ELASTIC_SPEC = {**STATIC_SPEC, "launch.rendezvous": "elastic", "save.strategy": "steps"}
HOSTFILE_SPEC = {
    **STATIC_SPEC,
    "launch.launcher": "deepspeed",
    "launch.hostfile": ("worker-1 slots=2", "worker-2 slots=2"),
}
DDP_SPEC = {"parallel.strategy": "ddp"}
THIS_MACHINE = replace(LAPTOP, name="")  # the machine that Footplate runs on
TORCHRUN = Fix("Use torchrun", {"launch.launcher": "torchrun"})
ONE_NODE = Fix("Run on one node", {"launch.rendezvous": "standalone"}, safe=False)
PRIVATE_NETWORK = "Allow connections between the nodes only, by a private network or a firewall."
STATIC = Fix("Use the static rendezvous", {"launch.rendezvous": "static"}, cost="nodes cannot leave or join")


# --- Rendezvous ---


@error(
    "NOD001",
    fields=("launch.node_rank", "launch.nnodes"),
    title="The node rank is too high",
    source="torch 2.13 distributed/run.py and elastic/rendezvous/static_tcp_rendezvous.py: the node rank is not "
    "checked, and ranks wait forever",
    fails_on=Example({**STATIC_SPEC, "launch.node_rank": 2}),
    passes_on=Example({**STATIC_SPEC, "launch.node_rank": 1}),
)
def node_rank_out_of_range(case: Case) -> Violation | None:
    """Node ranks count from 0. torch does not check them, and if one is too high, all nodes wait for each
    other forever."""
    launch, last = case.spec.launch, case.run.nnodes - 1
    if launch.rendezvous != "static" or launch.node_rank <= last:
        return None
    fix = Fix(f"Set the node rank to {last}", {"launch.node_rank": last})
    nodes = counted(case.run.nnodes, "node")
    return Violation(f"The node rank is {launch.node_rank}; with {nodes}, the highest rank is {last}.", (fix,))


@error(
    "NOD002",
    fields=("launch.master_addr",),
    title="The master address is missing or invalid",
    source="torch 2.13 distributed/run.py: nodes look for the TCPStore at the master address",
    fixes=(ONE_NODE,),
    manual_fix="Set launch.master_addr to the host name or IP address of node 0, without a port.",
    fails_on=Example({**STATIC_SPEC, "launch.master_addr": ""}),
    passes_on=Example(STATIC_SPEC),
)
def master_addr_invalid(case: Case) -> str | None:
    """All nodes connect to a TCPStore on node 0, so each of them needs the address of node 0."""
    address = case.spec.launch.master_addr
    if not _has_address(case) or _ip_address(address) or re.fullmatch(r"[\w.-]+", address):
        return None
    nodes = f"the run has {case.run.nnodes} nodes"
    if not address:
        return f"launch.master_addr is empty, and {nodes}."
    return f"launch.master_addr {address!r} is neither a host name nor an IP address, and {nodes}."


def _has_address(case: Case) -> bool:
    """Whether nodes find node 0 by launch.master_addr; a cluster tells them the address itself."""
    return case.run.nnodes > 1 and case.spec.launch.place == "local"


def _ip_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return None if "%" in address else ipaddress.ip_address(address)  # torch's endpoints have no IPv6 zone
    except ValueError:
        return None


@error(
    "NOD003",
    fields=("launch.master_addr",),
    title="The master address is a loopback address",
    source="torch 2.13 elastic/rendezvous/utils.py: localhost matches every node; each node finds its own store, or "
    "none, and waits",
    fixes=(ONE_NODE,),
    manual_fix="Set launch.master_addr to the host name or IP address by which the other nodes reach node 0.",
    fails_on=Example({**STATIC_SPEC, "launch.master_addr": "127.0.0.1"}),
    passes_on=Example(STATIC_SPEC),
)
def master_addr_is_loopback(case: Case) -> str | None:
    """A loopback address, or 0.0.0.0, means a different machine on every node: each node would connect to itself and
    wait for the others."""
    if not _has_address(case):
        return None
    address = case.spec.launch.master_addr
    ip = _ip_address(address)
    if address != "localhost" and (ip is None or not (ip.is_loopback or ip.is_unspecified)):
        return None
    return (
        f"launch.master_addr is {address}, and the run has {case.run.nnodes} nodes; the others cannot reach node 0 at "
        "this address."
    )


@error(
    "NOD015",
    fields=("launch.master_port",),
    title="The master port is in use",
    source="torch 2.13 distributed TCPStore, where the ranks connect: DistNetworkError, EADDRINUSE",
    fails_on=Example(STATIC_SPEC, THIS_MACHINE, replace(DEMO, port_in_use=29500, free_port=29501)),
    passes_on=Example(STATIC_SPEC, THIS_MACHINE),
    at_start=True,
)
def master_port_in_use(case: Case) -> Violation | None:
    """Node 0 listens on the master port, and the other nodes connect to it. Two multi-node runs use the same port
    unless they are given different ones."""
    port, free = case.facts.port_in_use, case.facts.free_port
    if not port or port != case.run.master_port or case.machine.name:
        return None
    fixes: tuple[Fix, ...] = (Fix(set_to("launch.master_port", free), {"launch.master_port": free}),) if free else ()
    uses = "another process on this machine uses" + (", or only root may use" if port < FIRST_PORT else "")
    return Violation(f"The run would listen on port {port}, which {uses}.", fixes)


@warning(
    "NOD016",
    fields=("launch.rendezvous",),
    title="Anyone who reaches the port of the elastic rendezvous can run code",
    source="torch 2.13 elastic/rendezvous/dynamic_rendezvous.py: unpickles what is in the TCPStore, which has no "
    "authentication and listens on all interfaces",
    fixes=(STATIC,),
    manual_fix=PRIVATE_NETWORK,
    fails_on=Example(ELASTIC_SPEC),
    passes_on=Example(STATIC_SPEC),
)
def elastic_rendezvous_open(case: Case) -> str | None:
    """The nodes of an elastic run keep its state as a pickle in torch's TCPStore, which anyone who reaches the port can
    overwrite. Reading a pickle can run any program."""
    if case.run.nnodes == 1 or case.spec.launch.rendezvous != "elastic":
        return None
    return (
        f"Port {case.spec.launch.master_port or DEFAULT_PORT} of node 0 has no authentication. Another host or another "
        "user of a node can write a pickle there, and torchrun on each node runs what it contains."
    )


@advice(
    "NOD017",
    fields=("launch.rendezvous", "launch.place"),
    title="The rendezvous of several nodes is open to the network",
    source="torch 2.13 TCPStore: listens on all interfaces, without authentication",
    manual_fix=PRIVATE_NETWORK,
    fails_on=Example(STATIC_SPEC),
    passes_on=Example(DDP_SPEC),
)
def store_open(case: Case) -> str | None:
    """The ranks of several nodes find each other through torch's TCPStore on node 0. Objects that ranks send to each
    other are signed, so no other user can run code through them, but addresses and tensors are not protected."""
    if case.run.nnodes == 1 or case.spec.launch.rendezvous == "elastic":
        return None
    return (
        f"The run has {case.run.nnodes} nodes, and torch's TCPStore on node 0 has no authentication. Another host or "
        "another user of a node that reaches its port can disturb the run or falsify what it trains."
    )


# --- Elastic runs ---


@error(
    "NOD004",
    fields=("launch.min_nnodes", "launch.nnodes"),
    title="The minimum number of nodes exceeds the maximum",
    source="torch 2.13 distributed/run.py: min_nodes must be > 0 and <= max_nodes",
    fails_on=Example({**ELASTIC_SPEC, "launch.min_nnodes": 3}),
    passes_on=Example({**ELASTIC_SPEC, "launch.min_nnodes": 2}),
)
def min_nnodes_exceeds_nnodes(case: Case) -> Violation | None:
    """An elastic run continues with any number of nodes from the minimum to the maximum, and torchrun refuses a minimum
    above the maximum."""
    launch = case.spec.launch
    if launch.rendezvous != "elastic" or launch.min_nnodes <= launch.nnodes:
        return None
    fix = Fix(f"Set a minimum of {counted(launch.nnodes, 'node')}", {"launch.min_nnodes": launch.nnodes})
    return Violation(f"At least {counted(launch.min_nnodes, 'node')} and at most {launch.nnodes} are set.", (fix,))


@error(
    "NOD005",
    fields=("launch.rendezvous", "launch.launcher"),
    title="Elastic runs need torchrun",
    source="accelerate 1.15 commands/launch.py and deepspeed 0.19 launcher/runner.py: a fixed number of nodes",
    fixes=(TORCHRUN, STATIC),
    fails_on=Example({**ELASTIC_SPEC, "launch.launcher": "accelerate"}),
    passes_on=Example(ELASTIC_SPEC),
)
def elastic_needs_torchrun(case: Case) -> str | None:
    """The launchers accelerate, deepspeed and python start a fixed number of nodes once. Only torchrun has a rendezvous
    that nodes can leave and join during the run."""
    launch = case.spec.launch
    if launch.rendezvous != "elastic" or launch.launcher == "torchrun":
        return None
    return f"launch.rendezvous is elastic, and the {launch.launcher} launcher starts a fixed number of nodes."


@error(
    "NOD006",
    fields=("launch.min_nnodes", "parallel.strategy", "train.optim"),
    title="The checkpoint cannot be resumed on fewer nodes",
    source="deepspeed 0.19 checkpoint/ds_to_universal.py: converts only exp_avg and exp_avg_sq; runtime/engine.py, "
    "load_checkpoint: loads no universal checkpoint with NVMe offload; "
    "runtime/sequence_parallel/parallel_state_sp.py: has no tensor-parallel world "
    "size, which loading needs; verified with FSDP2: any number of ranks from 2 on",
    fails_on=Example({**ELASTIC_SPEC, "parallel.strategy": "zero2", "method.kind": "full", "train.optim": "sgd"}),
    passes_on=Example({**ELASTIC_SPEC, "parallel.strategy": "zero2", "method.kind": "full"}),
)
def elastic_checkpoint_not_resizable(case: Case) -> Violation | None:
    """An elastic run resumes from a checkpoint of another world size. DeepSpeed can convert a checkpoint for that only
    if the optimizer is AdamW and neither NVMe offload nor sequence parallelism is used. FSDP2 needs at least two ranks,
    and their number must be divisible by replicate_size x context_parallel_size. DDP checkpoints work with any world
    size."""
    launch, engine = case.spec.launch, case.run.engine
    if launch.rendezvous != "elastic" or launch.min_nnodes >= launch.nnodes:
        return None
    if engine.can_resize_to(case.spec, case.run.nproc_per_node, launch.min_nnodes):
        return None
    obstacle = engine.resize_obstacle(case.spec)
    fixes = (
        Fix(f"Require all {launch.nnodes} nodes", {"launch.min_nnodes": launch.nnodes}, cost="waits for missing nodes"),
        DDP,
    )
    fewer = counted(launch.min_nnodes, "node")
    nodes = f"min_nnodes {launch.min_nnodes} is below nnodes {launch.nnodes}"
    reason = f" with {obstacle}" if obstacle and obstacle != case.strategy.label else ""
    message = f"{nodes}, and {case.strategy.label} checkpoints{reason} cannot be resumed on {fewer}."
    return Violation(message, fixes)


@advice(
    "NOD007",
    fields=("launch.min_nnodes",),
    title="The global batch size shrinks when nodes leave",
    source="arithmetic: global batch size = batch size per device x gradient accumulation x data-parallel size",
    fails_on=Example(ELASTIC_SPEC),
    passes_on=Example({**ELASTIC_SPEC, "launch.min_nnodes": 2}),
)
def elastic_batch_size_varies(case: Case) -> Violation | None:
    """While a node is missing, each optimizer step trains on fewer examples at the same learning rate, and an epoch
    takes more steps."""
    launch, largest = case.spec.launch, case.run.global_batch_size
    if launch.rendezvous != "elastic" or launch.min_nnodes >= launch.nnodes:
        return None
    smallest = largest // launch.nnodes * launch.min_nnodes
    fix = Fix("Require all nodes", {"launch.min_nnodes": launch.nnodes})
    nodes = f"{counted(launch.nnodes, 'node')} and {smallest:,} with {launch.min_nnodes}"
    return Violation(f"The global batch size is {largest:,} examples with {nodes}.", (fix,))


@warning(
    "NOD008",
    fields=("launch.max_restarts", "save.strategy", "save.only_model"),
    title="An elastic run without resumable checkpoints",
    source="torch 2.13 distributed/elastic: ranks start again as new processes; the trainer resumes from a checkpoint",
    fails_on=Example({**ELASTIC_SPEC, "save.strategy": "no"}),
    passes_on=Example(ELASTIC_SPEC),
)
def elastic_without_checkpoints(case: Case) -> Violation | None:
    """When a rank dies, or a node leaves or joins, torchrun restarts all ranks. They resume from the last checkpoint
    with optimizer state; without such a checkpoint, they start again at step 0."""
    save = case.spec.save
    if case.spec.launch.rendezvous != "elastic" or save.can_resume:
        return None
    if not case.run.engine.can_resume:
        message = "Tensor-parallel runs cannot be resumed from a checkpoint, so every restart begins at step 0."
        return Violation(message, (STATIC,))
    patch: dict[str, object] = {"save.only_model": False}
    if save.strategy == "no":
        patch |= {"save.strategy": "steps", "save.steps": save.steps, "save.total_limit": save.total_limit}
    has_room = case.estimated(case.with_patch(patch)).disk_bytes <= case.machine.disk_free_bytes
    setting = "save.strategy is no" if save.strategy == "no" else "save.only_model is on"
    fixes = (Fix("Save full checkpoints", patch),) if has_room else ()
    return Violation(f"{setting}, so a restarted run begins at step 0.", fixes)


# --- DeepSpeed's hostfile ---


@error(
    "NOD009",
    fields=("launch.hostfile",),
    title="The hostfile is invalid",
    source="deepspeed 0.19 launcher/runner.py: _parse_hostfile",
    fixes=(TORCHRUN,),
    fails_on=Example({**HOSTFILE_SPEC, "launch.hostfile": ("worker-1 slots=2", "worker-2")}),
    passes_on=Example(HOSTFILE_SPEC, TWO_H100),
)
def hostfile_invalid(case: Case) -> str | None:
    """The deepspeed launcher reads one host per line, 'NAME slots=N', each host once, in the order of node ranks."""
    if not _uses_hostfile(case):
        return None
    try:
        parse_hostfile(case.spec.launch.hostfile)
    except HostfileError as error:
        return f"launch.hostfile: {error}"
    return None


def _uses_hostfile(case: Case) -> bool:
    launch = case.spec.launch
    return launch.launcher == "deepspeed" and launch.rendezvous == "static" and case.run.nnodes > 1


@error(
    "NOD010",
    fields=("launch.include", "launch.devices", "launch.hostfile"),
    title="launch.include selects hosts or slots that are not in the hostfile",
    source="deepspeed 0.19 launcher/runner.py: parse_resource_filter",
    fixes=(Fix("Use the whole hostfile", {"launch.include": "", "launch.devices": ()}),),
    fails_on=Example({**HOSTFILE_SPEC, "launch.include": "worker-1@worker-3"}),
    passes_on=Example({**HOSTFILE_SPEC, "launch.include": "worker-1:0,1@worker-2"}),
)
def include_not_in_hostfile(case: Case) -> str | None:
    """launch.include (--include of the deepspeed launcher) selects hosts and slots of the hostfile. The launcher raises
    an exception for a host or slot that the hostfile does not list."""
    if not _uses_hostfile(case) or _selected_slots(case, "") is None:
        return None
    try:
        included_slots(case.spec.launch.hostfile, include_argument(case.spec))
    except HostfileError as error:
        return f"{'launch.include' if case.spec.launch.include else 'launch.devices'}: {error}"
    return None


def _selected_slots(case: Case, include: str) -> Slots | None:
    """Host -> selected slots; None for a hostfile or include that is invalid."""
    try:
        return included_slots(case.spec.launch.hostfile, include)
    except HostfileError:
        return None


@error(
    "NOD011",
    fields=("launch.hostfile", "launch.include", "launch.nnodes", "launch.nproc_per_node"),
    title="The hostfile does not match the number of nodes and processes",
    source="deepspeed 0.19 launcher/runner.py: one process per slot, on every selected host",
    manual_fix="Select as many hosts as nodes are set, each with as many slots as processes per node.",
    fails_on=Example({**HOSTFILE_SPEC, "launch.nnodes": 3}),
    passes_on=Example(HOSTFILE_SPEC),
)
def hostfile_size_mismatch(case: Case) -> Violation | None:
    """The deepspeed launcher starts one process per selected slot. Batch size, memory estimate and checkpoints are
    computed for the nodes and processes per node of the options, and the trainer refuses any other number."""
    found = _selected_slots(case, include_argument(case.spec)) if _uses_hostfile(case) else None
    if found is None:
        return None
    slots = [len(ids) for ids in found.values()]
    if len(slots) == case.run.nnodes and set(slots) == {case.run.nproc_per_node}:
        return None
    each = "1 slot" if set(slots) == {1} else f"{names(slots)} slots"
    selected = f"The hostfile selects {counted(len(slots), 'host')} with {each}"
    nodes, each = counted(case.run.nnodes, "node"), counted(case.run.nproc_per_node, "process")
    message = f"{selected}; the options set {nodes} with {each} per node."
    if len(set(slots)) > 1 or len(slots) < 2 or not slots[0]:
        return Violation(message)
    patch = {"launch.nnodes": len(slots), "launch.nproc_per_node": slots[0]}
    label = f"Use {len(slots)} nodes with {counted(slots[0], 'process')} each"
    return Violation(message, (Fix(label, patch, safe=False),))


@error(
    "NOD012",
    fields=("launch.devices", "launch.include"),
    title="Both launch.include and launch.devices select devices",
    source="deepspeed 0.19 launcher/runner.py: --include names hosts and their devices",
    fixes=(
        Fix("Keep the included hosts", {"launch.devices": ()}, cost="clears the list of device ids"),
        Fix("Keep the selected devices", {"launch.include": ""}, cost="the same device ids on every host"),
    ),
    fails_on=Example({**HOSTFILE_SPEC, "launch.include": "worker-1@worker-2", "launch.devices": (0, 1)}, TWO_H100),
    passes_on=Example({**HOSTFILE_SPEC, "launch.devices": (0, 1)}, TWO_H100),
)
def include_and_devices(case: Case) -> str | None:
    """Footplate passes device ids to the deepspeed launcher as --include for every host, and the launcher takes only
    one --include."""
    launch = case.spec.launch
    if not (_uses_hostfile(case) and launch.include and launch.devices and case.run.on_gpu):
        return None
    return f"launch.include is {launch.include}, and launch.devices lists {names(launch.devices)}."


@warning(
    "NOD014",
    fields=("launch.env", "launch.devices"),
    title="The deepspeed launcher ignores CUDA_VISIBLE_DEVICES",
    source="deepspeed 0.19 launcher/runner.py: the variable is ignored if --include is set",
    fails_on=Example({**HOSTFILE_SPEC, "launch.env": {"CUDA_VISIBLE_DEVICES": "1,0"}}, TWO_H100),
    passes_on=Example({**HOSTFILE_SPEC, "launch.devices": (0, 1)}, TWO_H100),
)
def visible_devices_ignored_by_deepspeed(case: Case) -> Violation | None:
    """The deepspeed launcher sets the visible devices of each process from its own device selection, and overwrites the
    value in launch.env. launch.devices selects devices with every launcher."""
    found = [name for name in case.spec.launch.env if name in VISIBLE_DEVICES_VARIABLES]
    if case.spec.launch.launcher != "deepspeed" or not found:
        return None
    message = f"launch.env sets {names(found)}, which the deepspeed launcher overwrites. Use launch.devices instead."
    return Violation(message, (without_variables(case, found),))


DEEPSPEED_LAUNCHER = {"parallel.strategy": "ddp", "launch.launcher": "deepspeed"}


# --- What the registry row requires ---


@error(
    "NOD013",
    fields=("launch.launcher",),
    title="The deepspeed launcher is not installed",
    source="arithmetic: the list of installed packages",
    fixes=(Fix("Use torchrun", {"launch.launcher": "torchrun"}),),
    fails_on=Example(DEEPSPEED_LAUNCHER, without("deepspeed")),
    passes_on=Example(DEEPSPEED_LAUNCHER),
)
def deepspeed_launcher_missing(case: Case) -> str | None:
    """The deepspeed launcher is part of the package deepspeed."""
    package = "deepspeed"
    if case.spec.launch.launcher != package or case.strategy.package == package:
        return None
    return missing_packages(case, "The deepspeed launcher", [package])
