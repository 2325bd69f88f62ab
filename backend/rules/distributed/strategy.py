"""Rules of all strategies: what the engine is missing on this machine, and options that the engine does not support.

Rules of a single engine are in the module named after it.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, error
from backend.rules.common_fixes import DDP, SINGLE_PROCESS, ZERO2
from backend.rules.distributed.examples import FOUR_PROCESSES, FULL, WITHOUT_DEEPSPEED, ZERO2_STRATEGY, with_cores
from backend.rules.examples import DEMO, LAPTOP, LOCAL_MODEL, TWO_H100
from backend.rules.requirements import missing_packages
from backend.wording import counted

APPLE = replace(LAPTOP, device="mps", name="Apple")


@error(
    "STR001",
    fields=("parallel.strategy",),
    title="The strategy's package is not installed",
    source="transformers 5.23 integrations/deepspeed.py: HfDeepSpeedConfig requires the package",
    fixes=(DDP,),
    fails_on=Example(ZERO2_STRATEGY, WITHOUT_DEEPSPEED),
    passes_on=Example(ZERO2_STRATEGY),
)
def missing_strategy_package(case: Case) -> str | None:
    """The strategy is implemented by a separate Python package, which the trainer imports when it starts."""
    package = case.strategy.package
    return missing_packages(case, case.strategy.label, [package] if package else [])


@error(
    "STR002",
    fields=("parallel.strategy", "launch.device"),
    title="Distributed training does not work on Apple GPUs",
    source="torch 2.13 distributed: no collective backend supports MPS tensors; accelerate 1.15 state.py: none is "
    "chosen, and each process would train alone",
    fixes=(
        SINGLE_PROCESS,
        Fix("Train on the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),
    ),
    fails_on=Example({**ZERO2_STRATEGY, "launch.nproc_per_node": 1}, APPLE),
    passes_on=Example(ZERO2_STRATEGY),
)
def distributed_training_on_mps(case: Case) -> str | None:
    """Processes exchange gradients through a torch.distributed backend, and none supports MPS tensors. DeepSpeed
    initializes a backend even for a single process."""
    run = case.run
    if run.device != "mps" or (run.world_size == 1 and not run.engine.needs_collectives):
        return None
    processes = counted(run.world_size, "process")
    return f"{case.strategy.label} with {processes} would use Apple GPUs (MPS), which have no collective backend."


@error(
    "STR003",
    fields=("save.load_best_model_at_end", "save.only_model", "parallel.strategy"),
    title="The best model cannot be loaded from checkpoints without optimizer state",
    source="transformers 5.23 trainer.py: save_only_model with an engine and load_best_model_at_end is refused",
    fixes=(
        Fix("Save the optimizer state too", {"save.only_model": False}, cost="larger checkpoints on disk"),
        Fix(
            "Keep the last model",
            {"save.load_best_model_at_end": False},
            safe=False,
            cost="the last checkpoint may be worse than the best",
        ),
    ),
    fails_on=Example({**ZERO2_STRATEGY, "save.load_best_model_at_end": True, "save.only_model": True}, TWO_H100),
    passes_on=Example({**ZERO2_STRATEGY, "save.load_best_model_at_end": True}, TWO_H100),
    proof="launch",
)
def best_model_without_optimizer_state(case: Case) -> str | None:
    """DeepSpeed and FSDP load the best checkpoint through the engine, which requires its optimizer state as well."""
    save = case.spec.save
    if not (case.run.engine.resumes_with_optimizer and save.load_best_model_at_end and save.only_model):
        return None
    return (
        f"save.load_best_model_at_end is set, but save.only_model leaves out the optimizer state that "
        f"{case.strategy.label} needs to load the best checkpoint."
    )


@error(
    "STR004",
    fields=("save.merge_adapter", "parallel.strategy", "lora.use_dora"),
    title="This adapter cannot be merged into sharded weights",
    source="peft 0.21 lora/layer.py and lora/variants.py; verified by launches without Footplate's check: ZeRO-3 saves "
    "the base weights unchanged, and so does FSDP2 with DoRA; FSDP1, which runs on GPUs only, is not verified",
    fixes=(
        Fix(
            "Save only the adapter",
            {"save.merge_adapter": False},
            cost="to get a merged model, run footplate merge after training",
        ),
        ZERO2,
    ),
    fails_on=Example({"parallel.strategy": "zero3", "save.merge_adapter": True}, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2", "save.merge_adapter": True}, TWO_H100),
)
def adapter_merge_with_sharded_weights(case: Case) -> str | None:
    """Merging adds the adapter to the base weights, but each rank holds only a shard of them: with ZeRO-3, and with
    FSDP2 and DoRA, the run would save the base model without the trained adapter. FSDP2 merges other LoRA adapters; on
    experts, it fails if the number of ranks does not divide that of the experts.
    After the run, `footplate merge` or *Merge into base model* on the run's page merges the adapter."""
    save, lora = case.spec.save, case.spec.lora
    if not (save.merge_adapter and save.final_model and case.spec.method.kind == "lora"):
        return None
    if not case.strategy.shards_weights:
        return None
    why = ""
    if case.run.engine.merges_adapters:
        why = " and lora.use_dora is on" if lora.use_dora else _split_experts(case)
        if not why:
            return None
    return f"{case.strategy.label} shards the base weights{why}, so the adapter cannot be merged at the end of the run."


def _split_experts(case: Case) -> str:
    """How shards end within an expert that has an adapter, as a part of a sentence; '' if none does."""
    experts, shards = case.shape.most_experts if case.shape else 0, case.run.parameter_shards
    if not experts or experts % shards == 0 or not case.spec.adapts_experts(case.facts.stacked_modules):
        return ""
    return f" over {shards} ranks, which do not divide the {experts} experts with an adapter"


@error(
    "STR005",
    fields=("eval.num_generations", "parallel.strategy"),
    title="Generations are not supported with FSDP1, context parallelism or sequence parallelism",
    source="verified with deepspeed 0.19: sequence parallelism changes the generated text; not verified: FSDP1 and "
    "context parallelism, which run on GPUs only. Other strategies gather the weights first (backend/train)",
    fixes=(
        Fix("Generate no samples", {"eval.num_generations": 0}, cost="no sample outputs to read"),
        Fix(
            "Use FSDP2 without context parallelism",
            {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 1},
            cost="long sequences take more memory",
        ),
    ),
    fails_on=Example({**FULL, "parallel.strategy": "fsdp1", "eval.num_generations": 8}, TWO_H100),
    passes_on=Example({"parallel.strategy": "zero3", "eval.num_generations": 8}, TWO_H100),
)
def unsupported_generations(case: Case) -> str | None:
    """Generation on sharded layers would deadlock when ranks stop at different lengths, so Footplate gathers all
    weights first. This is not verified with FSDP1. With context or sequence parallelism, attention expects a fixed
    shard of the tokens, but a generated sequence grows."""
    run, generations = case.run, case.spec.eval.num_generations
    if not generations or not registry.STAGES[case.spec.train.stage].generates:
        return None
    if run.token_shards > 1:
        return (
            f"eval.num_generations is {generations}, but each sequence is divided among {run.token_shards} devices by "
            "context or sequence parallelism, which does not support generation."
        )
    if run.engine.can_generate:
        return None
    return f"eval.num_generations is {generations}, but generation is not verified with {case.strategy.label}."


@error(
    "STR011",
    fields=("parallel.strategy", "launch.nproc_per_node"),
    title="This strategy needs at least two processes",
    source="transformers 5.23 trainer.py: without a process group, FSDP only works in distributed training",
    fixes=(
        Fix("Use the single-process strategy", {"parallel.strategy": "single"}),
        Fix("Start two processes", {"launch.nproc_per_node": 2}, cost="needs a second device"),
    ),
    fails_on=Example({"parallel.strategy": "fsdp2", "launch.nproc_per_node": 1}, TWO_H100),
    passes_on=Example({"parallel.strategy": "fsdp2"}, TWO_H100),
    proof="launch",
)
def sharding_with_one_process(case: Case) -> str | None:
    """FSDP and tensor parallelism shard the model over the processes of a process group. With one process there is
    nothing to shard, and Footplate starts no process group."""
    if not case.run.engine.needs_several_processes or case.run.world_size > 1:
        return None
    return f"{case.strategy.label} shards the model over processes, but the run starts only one process."


@error(
    "STR018",
    fields=(
        "parallel.replicate_size",
        "parallel.context_parallel_size",
        "parallel.tensor_parallel_size",
        "launch.nproc_per_node",
    ),
    title="The number of processes does not match the device mesh",
    source="accelerate 1.15 parallelism_config.py, transformers 5.23 distributed: the mesh sizes multiply to the world "
    "size",
    fixes=(
        Fix(
            "Use one replica and no context parallelism",
            {"parallel.replicate_size": 1, "parallel.context_parallel_size": 1},
            cost="all devices share one replica",
        ),
    ),
    fails_on=Example(
        {**FULL, **FOUR_PROCESSES, "parallel.strategy": "fsdp2", "parallel.replicate_size": 3}, with_cores(LAPTOP, 4)
    ),
    passes_on=Example(
        {**FULL, **FOUR_PROCESSES, "parallel.strategy": "fsdp2", "parallel.replicate_size": 2}, with_cores(LAPTOP, 4)
    ),
    proof="launch",
)
def device_mesh_mismatch(case: Case) -> Violation | None:
    """The world size must be a multiple of replicas x context parallel size (FSDP2) or of the tensor parallel size.
    With several FSDP2 replicas, each replica needs at least two processes to shard over."""
    run, parallel = case.run, case.spec.parallel
    divisor, processes = run.engine.mesh_divisor(case.spec), counted(run.world_size, "process")
    least = 2 * divisor if run.fsdp_version and parallel.replicate_size > 1 else divisor
    if run.world_size % divisor == 0 and (divisor == 1 or run.world_size >= least):
        return None
    if run.tensor_parallel_size > 1:
        wanted = max(1, run.world_size // divisor) * divisor
        message = f"{processes} cannot be divided into tensor parallel groups of {divisor}."
    else:
        wanted = 2 * divisor if run.world_size < 2 * divisor else run.world_size // divisor * divisor
        mesh = f"{counted(parallel.replicate_size, 'replica')} x context parallel size {parallel.context_parallel_size}"
        message = (
            f"A mesh of {mesh} needs a multiple of {divisor} processes, at least {least}; the run starts {processes}."
        )
    return Violation(message, _start_processes(case, wanted))


def _start_processes(case: Case, world_size: int) -> tuple[Fix, ...]:
    """A fix that starts this many processes on all nodes together, if they can be divided among the nodes."""
    each, rest = divmod(world_size, case.run.nnodes)
    fix = Fix(f"Start {counted(world_size, 'process')}", {"launch.nproc_per_node": each}, cost="one device per process")
    return () if rest else (fix,)


@error(
    "STR070",
    fields=("parallel.strategy", "parallel.ddp_find_unused_parameters"),
    title="The processes would skip different layers",
    source="transformers 5.23 models/opt/modeling_opt.py, OPTDecoder.forward: each process draws on its own which "
    "layers it skips (OPT, XGLM, BioGPT, TrOCR, Blenderbot Small); verified by running",
    fixes=(
        SINGLE_PROCESS,
        Fix(
            "Use DDP and find unused parameters",
            {"parallel.strategy": "ddp", "parallel.ddp_find_unused_parameters": True},
            safe=False,
            cost="no sharding",
        ),
    ),
    manual_fix="Set layerdrop to 0 in config.json.",
    fails_on=Example({**LOCAL_MODEL, "parallel.strategy": "zero3"}, TWO_H100, replace(DEMO, layerdrop=0.1)),
    passes_on=Example(
        {**LOCAL_MODEL, "parallel.strategy": "ddp", "parallel.ddp_find_unused_parameters": True},
        TWO_H100,
        replace(DEMO, layerdrop=0.1),
    ),
)
def layers_skipped_by_each_process(case: Case) -> str | None:
    """With layerdrop in config.json, training skips each decoder layer with this probability. Processes that skip
    different layers wait for different gradients or weights: the run fails or hangs. DDP can find the unused parameters
    of each process. Preference and reward training turn layerdrop off together with dropout."""
    run, probability = case.run, case.facts.layerdrop
    finds = run.engine.waits_for_all_gradients and case.spec.parallel.ddp_find_unused_parameters
    skips = probability > 0 and case.spec.train.stage in registry.NEXT_TOKEN_STAGES
    if run.world_size == 1 or not skips or finds or case.spec.model.source == "builtin":
        return None
    return (
        f"The layerdrop of config.json is {probability:g}, so each of the {run.world_size} processes would skip "
        "different layers in each step."
    )
