"""Rules of the strategies: engines, what they can be combined with, what they are worth.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.modelspec import ModelShape, matches, unfrozen
from backend.rules.base import Case, Example, Fix, rule
from backend.rules.common_fixes import DDP, FSDP2, ONE, ZERO2
from backend.rules.examples import DEMO, LAPTOP, TWO_H100

ZERO = {"parallel.strategy": "zero2"}
WITHOUT = {name: version for name, version in LAPTOP.versions.items() if name != "deepspeed"}
SEEING = replace(DEMO, is_multimodal=True)
FREEZE = {"parallel.strategy": "fsdp1", "method.kind": "freeze", "train.learning_rate": 1e-5}
APPLE = replace(LAPTOP, device="mps", name="Apple")


@rule(
    "STR001",
    "error",
    fields=("parallel.strategy",),
    title="The engine is not installed",
    source="transformers 5.23 integrations/deepspeed.py: HfDeepSpeedConfig asks for the package",
    fixes=(DDP,),
    fails_on=Example(ZERO, replace(LAPTOP, versions=WITHOUT)),
    passes_on=Example(ZERO),
)
def missing_engine(case: Case) -> str | None:
    """A strategy is done by its engine, a package of its own."""
    package = case.strategy.package
    if not package or not case.machine.versions or package in case.machine.versions:
        return None
    return f"{case.strategy.label} needs the package {package}: pip install {package}."


@rule(
    "STR002",
    "error",
    fields=("parallel.strategy", "launch.device"),
    title="Apple GPUs do not work together",
    source="torch 2.13 distributed: no collective backend serves MPS tensors; accelerate 1.15 state.py: none is "
    "chosen, and each process would train alone",
    fixes=(
        ONE,
        Fix("On the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),
    ),
    fails_on=Example({**ZERO, "launch.nproc_per_node": 1}, APPLE),
    passes_on=Example(ZERO),
)
def together_on_mps(case: Case) -> str | None:
    """Processes exchange gradients through a collective backend, and there is none for Apple's GPUs. DeepSpeed wants
    one even for a process alone."""
    many = case.run.world_size > 1 or case.strategy.engine == "deepspeed"
    return "The run would take Apple GPUs." if many and case.run.device == "mps" else None


@rule(
    "STR003",
    "error",
    fields=("save.load_best_model_at_end", "save.only_model", "parallel.strategy"),
    title="The engine cannot go back to weights alone",
    source="transformers 5.23 trainer.py: save_only_model with an engine and load_best_model_at_end is refused",
    fixes=(
        Fix("Whole checkpoints", {"save.only_model": False}, cost="larger on disk"),
        Fix("End with the last weights", {"save.load_best_model_at_end": False}, safe=False, cost="they may be worse"),
    ),
    fails_on=Example({**ZERO, "save.load_best_model_at_end": True, "save.only_model": True}, TWO_H100),
    passes_on=Example({**ZERO, "save.load_best_model_at_end": True}, TWO_H100),
    proof="launch",
)
def best_without_state(case: Case) -> str | None:
    """To end with the best checkpoint the engine loads it whole, its optimizer's parts included."""
    if case.strategy.engine not in ("deepspeed", "fsdp") or not (
        case.spec.save.load_best_model_at_end and case.spec.save.only_model
    ):
        return None
    return "The best checkpoint is wanted at the end, and checkpoints hold weights alone."


@rule(
    "STR004",
    "error",
    fields=("save.merge_adapter", "parallel.strategy"),
    title="Adapters cannot be merged into spread weights",
    source="peft 0.21 lora/layer.py: merging adds to base weights, of which each rank holds a part; launched without "
    "our check, ZeRO-3 saves the base as it was",
    fixes=(
        Fix("Save the adapter alone", {"save.merge_adapter": False}, cost="to merge afterwards"),
        ZERO2,
    ),
    fails_on=Example({"parallel.strategy": "zero3", "save.merge_adapter": True}, TWO_H100),
    passes_on=Example({"parallel.strategy": "zero3"}, TWO_H100),
)
def merge_spread(case: Case) -> str | None:
    """Where weights are spread, no rank has those that an adapter would be merged into. It can be merged afterwards,
    by peft's merge_and_unload."""
    merged = case.spec.save.merge_adapter and case.spec.save.final_model and case.spec.method.kind == "lora"
    return "The trained model is asked for in one piece." if case.strategy.shards_weights and merged else None


@rule(
    "STR005",
    "error",
    fields=("eval.num_generations", "parallel.strategy"),
    title="No answers with FSDP1, nor where devices share a row",
    source="launched with deepspeed 0.19: other answers with sequence parallel; not proven: FSDP1 and context "
    "parallel run on GPUs alone. Others gather the weights for the answers (train/gathered.py)",
    fixes=(
        Fix("Without answers", {"eval.num_generations": 0}, cost="nothing to read"),
        Fix("FSDP2, whole rows", {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 1}),
    ),
    fails_on=Example({"parallel.strategy": "fsdp1", "eval.num_generations": 8}, TWO_H100),
    passes_on=Example({"parallel.strategy": "zero3", "eval.num_generations": 8}, TWO_H100),
)
def answers_spread(case: Case) -> str | None:
    """Ranks whose answers end at different lengths would wait for one another where layers are gathered one by one. So
    ZeRO-3 and FSDP2 gather all of the weights before they answer, which FSDP1 has not been seen to do. And an attention
    that is shared by devices expects its piece of a row, not an answer that grows."""
    asked = case.spec.eval.num_generations and registry.STAGES[case.spec.train.stage].answers
    return (
        "Answers are asked for." if asked and (case.run.token_shards > 1 or case.strategy.fsdp_version == 1) else None
    )


@rule(
    "STR006",
    "advice",
    fields=("parallel.strategy",),
    title="ZeRO has nothing to spread worth its messages",
    source="arithmetic: the optimizer's state of an adapter is small",
    fixes=(DDP,),
    fails_on=Example(ZERO, TWO_H100),
    passes_on=Example({**ZERO, "method.kind": "full", "train.learning_rate": 1e-5}, TWO_H100),
)
def little_to_spread(case: Case) -> str | None:
    """ZeRO-1 and 2 spread what training adds to the weights. Adapters add so little that DDP is simpler and as
    small."""
    if case.strategy.zero_stage not in (1, 2) or case.spec.method.kind != "lora" or case.run.world_size == 1:
        return None
    return "Only adapters are trained."


@rule(
    "STR007",
    "error",
    fields=("parallel.strategy", "launch.device", "parallel.offload_optimizer"),
    title="DeepSpeed needs a C++ compiler",
    source="deepspeed 0.19 comm/torch.py: build_shm_op, and ops/op_builder/cpu/cpu_adam.py: built on first use",
    fixes=(DDP,),
    manual_fix="On Debian: apt-get install g++ python3-dev.",
    fails_on=Example(ZERO, replace(LAPTOP, compiler=False)),
    passes_on=Example(ZERO),
)
def no_compiler(case: Case) -> str | None:
    """On a CPU its processes talk through kernels that DeepSpeed builds on first use, in a minute or two; and an
    optimizer that works in the host's memory is built likewise, beside GPUs too."""
    hosted = case.strategy.zero_stage and case.spec.parallel.offload_optimizer != "none"
    needed = case.strategy.engine == "deepspeed" and (case.run.device == "cpu" or hosted)
    return "There is no c++ on the path, or Python has no headers." if needed and not case.machine.compiler else None


@rule(
    "STR008",
    "error",
    fields=("parallel.strategy",),
    title="A killed build would be waited for, without end",
    source="torch 2.13 utils/file_baton.py: a process waits until the lock file is gone",
    fixes=(DDP,),
    fails_on=Example(ZERO, replace(LAPTOP, stale_lock="torch_extensions/deepspeed_shm_comm/lock")),
    passes_on=Example(ZERO),
)
def stale_lock(case: Case) -> str | None:
    """A build of DeepSpeed's kernels that is killed leaves its lock file, and every later run waits for that build,
    without a word."""
    lock = case.machine.stale_lock
    return f"Delete {lock}." if lock and case.strategy.engine == "deepspeed" and case.run.device == "cpu" else None


@rule(
    "STR045",
    "error",
    fields=("parallel.ddp_find_unused_parameters", "parallel.strategy"),
    title="DDP would wait for layers that text does not reach",
    source="seen with torch 2.13 and a Gemma 3 on two processes: Expected to have finished reduction in the prior "
    "iteration, at the second step",
    fixes=(Fix("Find them", {"parallel.ddp_find_unused_parameters": True}, cost="a search in every step"), FSDP2),
    fails_on=Example({"parallel.strategy": "ddp"}, TWO_H100, SEEING),
    passes_on=Example({"parallel.strategy": "ddp", "parallel.ddp_find_unused_parameters": True}, TWO_H100, SEEING),
)
def unreached(case: Case) -> str | None:
    """The model has layers for pictures or sound. Rows of text leave them without a gradient, for which DDP waits
    unless it looks for such weights in every step."""
    method, parallel = case.spec.method, case.spec.parallel
    # Adapters by name, and single layers, may stay clear of them.
    taught = method.kind == "full" or (method.kind == "lora" and case.spec.lora.targets != "custom")
    waits = case.strategy.engine == "ddp" and case.run.world_size > 1 and not parallel.ddp_find_unused_parameters
    found = case.facts.is_multimodal and waits and taught
    return "Rows of text do not reach its layers for pictures or sound." if found else None


def _units(shape: ModelShape, names: list[str]) -> bool:
    """Whether a layer, or what lies beside the layers, has both trained and frozen weights."""
    units: dict[str, set[bool]] = {}
    for leaf in shape.leaves():
        inner = leaf.path.startswith(f"{shape.stack}.")
        unit = leaf.path[len(shape.stack) + 1 :].partition(".")[0] if inner else ""
        if leaf.parameters:
            units.setdefault(unit, set()).add(any(matches(leaf.path, name) for name in names))
    return any(len(kinds) > 1 for kinds in units.values())


@rule(
    "STR046",
    "error",
    fields=("method.freeze_extra_modules", "parallel.strategy", "precision.compute"),
    title="FSDP1 wants one type in a layer",
    source="torch 2.13 distributed/fsdp/_flat_param.py: Must flatten tensors with uniform dtype",
    fixes=(
        FSDP2,
        Fix("Whole layers alone", {"method.freeze_extra_modules": ()}, safe=False, cost="what is named stays as it is"),
        Fix("Full precision", {"precision.compute": "fp32"}, safe=False, cost="twice the memory, slower"),
    ),
    fails_on=Example({**FREEZE, "method.freeze_extra_modules": ("norm",)}, TWO_H100),
    passes_on=Example(FREEZE, TWO_H100),
)
def mixed_units(case: Case) -> str | None:
    """The first FSDP lays the weights of a layer end to end, and so what lies beside the layers. Trained ones are held
    in fp32 and frozen ones are not, so none of these may have both."""
    method, shape = case.spec.method, case.shape
    held = case.run.compute_dtype != "fp32" and case.run.fp32_master_weights
    if case.strategy.fsdp_version != 1 or method.kind != "freeze" or shape is None or not held:
        return None
    if case.spec.parallel.transformer_layer_cls_to_wrap or not _units(shape, unfrozen(method, shape)):
        return None
    return f"Some weights of a layer would be in {case.run.compute_dtype}, and others in fp32."
