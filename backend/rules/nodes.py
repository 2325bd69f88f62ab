"""Rules of several nodes: who meets where, what may come and go, and DeepSpeed's hostfile.

Floor 3. Imports: below.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import replace

from backend.launch.hostfile import HostfileError, Slots, chosen, hosts, include_argument
from backend.rules.base import Case, Example, Fix, Violation, counted, names, rule
from backend.rules.common_fixes import DDP
from backend.rules.examples import DEMO, LAPTOP, TWO_H100
from backend.rules.launch import VISIBLE, without

TWO = {"parallel.strategy": "ddp", "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
ELASTIC = {**TWO, "launch.rendezvous": "elastic", "save.strategy": "steps"}
HOSTS = {**TWO, "launch.launcher": "deepspeed", "launch.hostfile": ("worker-1 slots=2", "worker-2 slots=2")}
WITHOUT = replace(LAPTOP, versions={name: v for name, v in LAPTOP.versions.items() if name != "deepspeed"})
BY_TORCHRUN = Fix("Start with torchrun", {"launch.launcher": "torchrun"})


@rule(
    "NOD001",
    "error",
    fields=("launch.node_rank", "launch.nnodes"),
    title="A node rank beyond the nodes",
    source="torch 2.13 distributed/run.py and elastic/rendezvous/static_tcp_rendezvous.py: nobody looks, and ranks "
    "wait for ever",
    fails_on=Example({**TWO, "launch.node_rank": 2}),
    passes_on=Example({**TWO, "launch.node_rank": 1}),
)
def rank_beyond(case: Case) -> Violation | None:
    """Ranks of nodes count from 0. With one that is too large the nodes wait for each other, without a word."""
    launch = case.spec.launch
    if launch.rendezvous != "static" or launch.node_rank < case.run.nnodes:
        return None
    fix = Fix(f"The last one, {case.run.nnodes - 1}", {"launch.node_rank": case.run.nnodes - 1})
    return Violation(
        f"Rank {launch.node_rank} of {counted(case.run.nnodes, 'node')}: the last one is {case.run.nnodes - 1}.", (fix,)
    )


@rule(
    "NOD002",
    "error",
    fields=("launch.master_addr",),
    title="No address to meet at",
    source="torch 2.13 distributed/run.py: the store is looked for at the master's address",
    fixes=(Fix("One node", {"launch.rendezvous": "standalone"}, safe=False),),
    manual_fix="Give the name or the IP of node 0, without a port.",
    fails_on=Example({**TWO, "launch.master_addr": ""}),
    passes_on=Example(TWO),
)
def no_address(case: Case) -> str | None:
    """All nodes meet at node 0, so each of them must know where that is."""
    address = case.spec.launch.master_addr
    if case.run.nnodes == 1 or _ip(address) or re.fullmatch(r"[\w.-]+", address):
        return None
    return f"{address!r} is no address." if address else "The address of node 0 is empty."


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


@rule(
    "NOD003",
    "error",
    fields=("launch.master_addr",),
    title="An address that only node 0 can reach",
    source="torch 2.13 elastic/rendezvous/utils.py: localhost is every node; each finds a store of its own, or none, "
    "and waits",
    fixes=(Fix("One node", {"launch.rendezvous": "standalone"}, safe=False),),
    manual_fix="Give the name or the IP by which the other nodes reach node 0.",
    fails_on=Example({**TWO, "launch.master_addr": "127.0.0.1"}),
    passes_on=Example(TWO),
)
def loopback(case: Case) -> str | None:
    """On every node localhost is another machine: each would meet itself."""
    address = case.spec.launch.master_addr
    found = _ip(address)
    local = address == "localhost" or (found is not None and found.is_loopback)
    return f"{address} is every node's own." if case.run.nnodes > 1 and local else None


@rule(
    "NOD004",
    "error",
    fields=("launch.min_nnodes", "launch.nnodes"),
    title="At least more than at most",
    source="torch 2.13 distributed/run.py: min_nodes must be > 0 and <= max_nodes",
    fails_on=Example({**ELASTIC, "launch.min_nnodes": 3}),
    passes_on=Example({**ELASTIC, "launch.min_nnodes": 2}),
)
def range_turned(case: Case) -> Violation | None:
    """An elastic run goes on with any number of nodes in a range; its lower end cannot lie above the upper one."""
    launch = case.spec.launch
    if launch.rendezvous != "elastic" or launch.min_nnodes <= launch.nnodes:
        return None
    fix = Fix(f"At least {launch.nnodes}", {"launch.min_nnodes": launch.nnodes})
    return Violation(f"At least {launch.min_nnodes}, at most {launch.nnodes}.", (fix,))


@rule(
    "NOD005",
    "error",
    fields=("launch.rendezvous", "launch.launcher"),
    title="Only torchrun is elastic",
    source="accelerate 1.15 commands/launch.py and deepspeed 0.19 launcher/runner.py: a fixed number of nodes",
    fixes=(BY_TORCHRUN, Fix("Several nodes", {"launch.rendezvous": "static"}, cost="no node may come or go")),
    fails_on=Example({**ELASTIC, "launch.launcher": "accelerate"}),
    passes_on=Example(ELASTIC),
)
def elastic_launcher(case: Case) -> str | None:
    """The other launchers start a fixed number of nodes once, and know no rendezvous that can be joined later."""
    launch = case.spec.launch
    if launch.rendezvous != "elastic" or launch.launcher == "torchrun":
        return None
    return f"{launch.launcher} starts a fixed number of nodes."


@rule(
    "NOD006",
    "error",
    fields=("launch.min_nnodes", "parallel.strategy", "train.optim"),
    title="Too few nodes to go on from a checkpoint",
    source="deepspeed 0.19 checkpoint/ds_to_universal.py: exp_avg and exp_avg_sq alone; runtime/engine.py, "
    "load_checkpoint: none from NVMe; runtime/sequence_parallel/parallel_state_sp.py: no tensor-parallel world size, "
    "which the load asks for; seen with FSDP2: any number from 2 on",
    fails_on=Example({**ELASTIC, "parallel.strategy": "zero2", "method.kind": "full", "train.optim": "sgd"}),
    passes_on=Example({**ELASTIC, "parallel.strategy": "zero2", "method.kind": "full"}),
)
def elastic_parts(case: Case) -> Violation | None:
    """DeepSpeed saves a part a rank. For another number of ranks its parts are converted, which it can do with AdamW's
    state alone, not from a disk, and not for sequence parallel. FSDP shares its parts out anew, among two ranks at
    least, which replicas and context must divide. With DDP any number goes on. Where all nodes must be there, ranks
    that die still come back."""
    launch, parallel, row = case.spec.launch, case.spec.parallel, case.strategy
    if launch.rendezvous != "elastic" or row.engine == "ddp" or launch.min_nnodes >= launch.nnodes:
        return None
    mesh = parallel.replicate_size * parallel.context_parallel_size if row.fsdp_version == 2 else 1
    least = case.run.nproc_per_node * launch.min_nnodes
    if row.engine == "fsdp" and least // mesh > 1 and case.run.nproc_per_node % mesh == 0:
        return None
    if row.engine == "deepspeed" and not case.run.engine.resize_obstacle(case.spec):
        return None
    fixes = (
        Fix(f"All {launch.nnodes} nodes", {"launch.min_nnodes": launch.nnodes}, cost="waits when one is gone"),
        DDP,
    )
    return Violation(f"With {launch.min_nnodes} of {launch.nnodes} nodes no checkpoint could be read.", fixes)


@rule(
    "NOD007",
    "advice",
    fields=("launch.min_nnodes",),
    title="Fewer nodes make a smaller step",
    source="arithmetic: rows of a step = batch size x accumulation x processes",
    fails_on=Example(ELASTIC),
    passes_on=Example({**ELASTIC, "launch.min_nnodes": 2}),
)
def elastic_batch(case: Case) -> Violation | None:
    """While a node is away, a step learns from fewer rows at the same learning rate, and a pass has more steps."""
    launch = case.spec.launch
    if launch.rendezvous != "elastic" or launch.min_nnodes >= launch.nnodes:
        return None
    most = case.run.global_batch_size
    least = most // launch.nnodes * launch.min_nnodes
    fix = Fix("Wait for all nodes", {"launch.min_nnodes": launch.nnodes})
    return Violation(f"{most:,} rows a step with all nodes, {least:,} with the fewest.", (fix,))


@rule(
    "NOD008",
    "warning",
    fields=("launch.max_restarts", "save.strategy", "save.only_model"),
    title="Restarts that begin at step 0",
    source="torch 2.13 distributed/elastic: ranks start again as new processes; the trainer goes on from a checkpoint",
    fails_on=Example({**ELASTIC, "save.strategy": "no"}),
    passes_on=Example(ELASTIC),
)
def nothing_to_return_to(case: Case) -> Violation | None:
    """When a rank dies, or a node comes or goes, all ranks start again. What was learned since the last whole
    checkpoint is lost, and without one everything is."""
    if case.spec.launch.rendezvous != "elastic" or (case.spec.save.strategy != "no" and not case.spec.save.only_model):
        return None
    if case.strategy.engine == "tensor":  # which has none
        fix = Fix("Several nodes", {"launch.rendezvous": "static"}, cost="no node may come or go")
        return Violation("A run of slices keeps no checkpoint that training could go on from.", (fix,))
    patch: dict[str, object] = {"save.only_model": False}
    if case.spec.save.strategy == "no":
        patch |= {
            "save.strategy": "steps",
            "save.steps": case.spec.save.steps,
            "save.total_limit": case.spec.save.total_limit,
        }
    room = case.estimated(case.with_patch(patch)).disk_bytes <= case.machine.disk_free_bytes
    fixes = (Fix("Keep whole checkpoints", patch),) if room else ()
    return Violation("No checkpoint is kept that training could go on from.", fixes)


@rule(
    "NOD009",
    "error",
    fields=("launch.hostfile",),
    title="Not a hostfile",
    source="deepspeed 0.19 launcher/runner.py: _parse_hostfile",
    fixes=(BY_TORCHRUN,),
    fails_on=Example({**HOSTS, "launch.hostfile": ("worker-1 slots=2", "worker-2")}),
    passes_on=Example(HOSTS, TWO_H100),
)
def not_a_hostfile(case: Case) -> str | None:
    """DeepSpeed's launcher reads a name and a number of slots a line, each name once, in the order of node ranks."""
    if not _by_hostfile(case):
        return None
    try:
        hosts(case.spec.launch.hostfile)
    except HostfileError as error:
        return str(error)
    return None


def _by_hostfile(case: Case) -> bool:
    launch = case.spec.launch
    return launch.launcher == "deepspeed" and launch.rendezvous == "static" and case.run.nnodes > 1


@rule(
    "NOD010",
    "error",
    fields=("launch.include", "launch.devices", "launch.hostfile"),
    title="Included, but not in the hostfile",
    source="deepspeed 0.19 launcher/runner.py: parse_resource_filter",
    fixes=(Fix("The whole hostfile", {"launch.include": "", "launch.devices": ()}),),
    fails_on=Example({**HOSTS, "launch.include": "worker-1@worker-3"}),
    passes_on=Example({**HOSTS, "launch.include": "worker-1:0,1@worker-2"}),
)
def include_unknown(case: Case) -> str | None:
    """An include chooses among the hosts and slots of the hostfile; DeepSpeed ends with an exception at any other."""
    if not _by_hostfile(case) or _selected(case, "") is None:
        return None
    try:
        chosen(case.spec.launch.hostfile, include_argument(case.spec))
    except HostfileError as error:
        return str(error)
    return None


def _selected(case: Case, include: str) -> Slots | None:
    try:
        return chosen(case.spec.launch.hostfile, include)
    except HostfileError:
        return None


@rule(
    "NOD011",
    "error",
    fields=("launch.hostfile", "launch.include", "launch.nnodes", "launch.nproc_per_node"),
    title="Hostfile and numbers disagree",
    source="deepspeed 0.19 launcher/runner.py: a process a slot, on every host that is chosen",
    manual_fix="Let the hostfile choose as many hosts as nodes, each with as many slots as processes.",
    fails_on=Example({**HOSTS, "launch.nnodes": 3}),
    passes_on=Example(HOSTS),
)
def hostfile_differs(case: Case) -> Violation | None:
    """Batch, memory and checkpoints are reckoned for nodes x processes, and the trainer insists on that number."""
    found = _selected(case, include_argument(case.spec)) if _by_hostfile(case) else None
    if found is None:
        return None
    slots = [len(ids) for ids in found.values()]
    if len(slots) == case.run.nnodes and set(slots) == {case.run.nproc_per_node}:
        return None
    said = f"{counted(len(slots), 'host')} with {', '.join(map(str, slots))} slots"
    message = f"The hostfile chooses {said}; asked for are {case.run.nnodes} x {case.run.nproc_per_node}."
    if len(set(slots)) > 1 or len(slots) < 2 or not slots[0]:
        return Violation(message)
    patch = {"launch.nnodes": len(slots), "launch.nproc_per_node": slots[0]}
    return Violation(message, (Fix(f"{len(slots)} nodes with {counted(slots[0], 'process')}", patch, safe=False),))


@rule(
    "NOD012",
    "error",
    fields=("launch.devices", "launch.include"),
    title="Devices named twice over",
    source="deepspeed 0.19 launcher/runner.py: an include names hosts and their devices",
    fixes=(
        Fix("By the include", {"launch.devices": ()}, cost="the device ids are dropped"),
        Fix("By the ids, on every host", {"launch.include": ""}, cost="the include is dropped"),
    ),
    fails_on=Example({**HOSTS, "launch.include": "worker-1@worker-2", "launch.devices": (0, 1)}, TWO_H100),
    passes_on=Example({**HOSTS, "launch.devices": (0, 1)}, TWO_H100),
)
def two_choices(case: Case) -> str | None:
    """Device ids become an include for every host; an include of one's own says the same again, or something else."""
    launch = case.spec.launch
    both = _by_hostfile(case) and launch.include and launch.devices and case.run.on_gpu
    return "The include and the device ids both choose devices." if both else None


@rule(
    "NOD013",
    "error",
    fields=("launch.launcher",),
    title="The launcher is not installed",
    source="arithmetic: the list of installed packages",
    fixes=(BY_TORCHRUN,),
    fails_on=Example({"parallel.strategy": "ddp", "launch.launcher": "deepspeed"}, WITHOUT),
    passes_on=Example({"parallel.strategy": "ddp", "launch.launcher": "deepspeed"}),
)
def missing_launcher(case: Case) -> str | None:
    """The deepspeed launcher comes with a package of its own."""
    there, launcher = case.machine.versions, case.spec.launch.launcher
    engine = case.strategy.package  # a rule of its own says so
    if launcher != "deepspeed" or not there or launcher in there or launcher == engine:
        return None
    return "It needs the package deepspeed: pip install deepspeed."


@rule(
    "NOD014",
    "warning",
    fields=("launch.env", "launch.devices"),
    title="deepspeed chooses the devices itself",
    source="deepspeed 0.19 launcher/runner.py: beside --include the variable is ignored",
    fails_on=Example({**HOSTS, "launch.env": {"CUDA_VISIBLE_DEVICES": "1,0"}}, TWO_H100),
    passes_on=Example({**HOSTS, "launch.devices": (0, 1)}, TWO_H100),
)
def ignored_variable(case: Case) -> Violation | None:
    """Its launcher sets what each process sees from the devices that it was told of, over any value of one's own."""
    found = [name for name in case.spec.launch.env if name in VISIBLE]
    if case.spec.launch.launcher != "deepspeed" or not found:
        return None
    return Violation(f"{names(found)} will have no effect; launch.devices has one.", (without(case, found),))


HERE = replace(LAPTOP, name="")  # the machine that Footplate runs on
BY_DEEPSPEED = {"parallel.strategy": "ddp", "launch.launcher": "deepspeed"}


@rule(
    "NOD015",
    "error",
    fields=("launch.master_port",),
    title="The port is taken",
    source="torch 2.13 distributed TCPStore, where the ranks meet: DistNetworkError, EADDRINUSE; deepspeed 0.19 "
    "launcher/runner.py: --master_port is 29500 unless told otherwise",
    fails_on=Example(BY_DEEPSPEED, HERE, replace(DEMO, taken=29500, spare=29501)),
    passes_on=Example(BY_DEEPSPEED, HERE),
)
def port_taken(case: Case) -> Violation | None:
    """The ranks of a run meet at a port of their own. Two runs with several nodes, or two of DeepSpeed's launcher, take
    the same one unless they are told of others."""
    taken, spare = case.facts.taken, case.facts.spare
    if not taken or taken != case.run.master_port or case.machine.name:
        return None
    fixes: tuple[Fix, ...] = (Fix(f"Port {spare}", {"launch.master_port": spare}),) if spare else ()
    if case.run.nnodes == 1:
        fixes += (
            Fix(
                "A free one, by torchrun",
                {"launch.launcher": "torchrun", "launch.master_port": 0},
                cost="another launcher",
            ),
        )
    return Violation(f"Something on this machine listens at {taken}.", fixes)
