"""Rules of FSDP2 and FSDP1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backend import registry
from backend.modelspec import ModelShape, ModuleSpec, matches_any, trained_modules, unfrozen_modules
from backend.rules.base import Case, Example, Fix, Violation, error, names, warning
from backend.rules.common_fixes import DDP, FSDP2, ZERO3
from backend.rules.examples import DEMO, SMOL, TWO_H100

FSDP2_STRATEGY, FSDP1_STRATEGY = {"parallel.strategy": "fsdp2"}, {"parallel.strategy": "fsdp1"}
FREEZE = {**FSDP1_STRATEGY, "method.kind": "freeze", "train.learning_rate": 1e-5}
FSDP1_FULL = {**FREEZE, "method.kind": "full"}
NODES = {**FSDP1_FULL, "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1", "launch.nnodes": 2}
HYBRID = {**NODES, "parallel.sharding_strategy": "hybrid_shard"}
LLAMA_CLASSES = replace(DEMO, module_classes=("LlamaDecoderLayer", "LlamaMLP"))
SHARDED = {**FSDP2_STRATEGY, "parallel.state_dict_type": "sharded"}
UNTIED_FULL = {**FSDP2_STRATEGY, "method.kind": "full", "train.learning_rate": 1e-5}
UNTIED = replace(SMOL, tied=False)
WITHOUT_LAST_NORM = replace(
    UNTIED, non_layer_modules=tuple(each for each in SMOL.non_layer_modules if each.path != "model.norm")
)


@error(
    "STR009",
    fields=("parallel.strategy", "launch.device"),
    title="FSDP1 does not run on a CPU",
    source="accelerate 1.15 utils/dataclasses.py: FullyShardedDataParallelPlugin requires an accelerator for version 1",
    fixes=(FSDP2, DDP),
    fails_on=Example(FSDP1_FULL),
    passes_on=Example(FSDP1_FULL, TWO_H100),
    proof="launch",
)
def fsdp1_on_cpu(case: Case) -> str | None:
    """The accelerate library supports FSDP1 only on accelerators such as GPUs. FSDP2 also runs on a CPU."""
    if case.run.fsdp_version != 1 or case.run.device != "cpu":
        return None
    return "FSDP1 requires an accelerator, but this run would use the CPU."


@warning(
    "STR010",
    fields=("parallel.strategy",),
    title="FSDP1 is deprecated",
    source="transformers 5.23 training_args.py: deprecated, to be removed",
    fixes=(FSDP2,),
    fails_on=Example(FSDP1_FULL, TWO_H100),
    passes_on=Example(FSDP2_STRATEGY, TWO_H100),
)
def deprecated_fsdp1(case: Case) -> str | None:
    """FSDP2 shards each parameter separately. It needs less memory, supports frozen and trainable parameters in one
    layer, and can resume a checkpoint with a different number of processes."""
    if case.run.fsdp_version != 1:
        return None
    return "transformers 5 deprecates FSDP1 and will remove it. FSDP2 replaces it."


@error(
    "STR049",
    fields=("parallel.strategy", "method.kind"),
    title="LoRA adapters are not saved under FSDP1",
    source="peft 0.21 tuners/tuners_utils.py _get_tuner_state_dict_key_prefixes: removes _fsdp_wrapped_module from the "
    "start of a module's name only, but FSDP1 wraps every layer",
    fixes=(FSDP2,),
    fails_on=Example(FSDP1_STRATEGY, TWO_H100),
    passes_on=Example(FSDP2_STRATEGY, TWO_H100),
)
def lora_on_fsdp1(case: Case) -> str | None:
    """peft looks up the adapter's weights by module names, which differ from the names in the state dict when layers
    are wrapped by FSDP1. The saved adapter and all checkpoints would be empty, without an error. FSDP2 wraps no
    modules; it shards LoRA and QLoRA alike."""
    if case.run.fsdp_version != 1 or case.spec.method.kind != "lora":
        return None
    return "The strategy is FSDP1 and method.kind is lora: the saved adapter and the checkpoints would have no weights."


@error(
    "STR053",
    fields=("parallel.sharding_strategy", "launch.nproc_per_node", "launch.nnodes"),
    title="HYBRID_SHARD with one process per node averages no gradients",
    source="torch 2.13 distributed/fsdp/_init_utils.py _init_core_state: switches to NO_SHARD in a group of one "
    "process; _runtime_utils.py _reduce_grad_no_shard: adds within that group only",
    fixes=(
        FSDP2,
        Fix(
            "Use FULL_SHARD",
            {"parallel.sharding_strategy": "full_shard"},
            cost="weights are gathered between nodes for every layer",
        ),
    ),
    fails_on=Example({**HYBRID, "launch.nproc_per_node": 1}, TWO_H100),
    passes_on=Example({**HYBRID, "launch.nproc_per_node": 2}, TWO_H100),
)
def hybrid_shard_with_one_process_per_node(case: Case) -> str | None:
    """HYBRID_SHARD shards within a node and averages gradients between the nodes. With one process per node, torch
    replaces it with NO_SHARD within the node and skips the average between the nodes, and warns only about the
    sharding. Every node would train a different model, and the model of rank 0 would be saved."""
    run = case.run
    if run.fsdp_version != 1 or case.spec.parallel.sharding_strategy != "hybrid_shard":
        return None
    if run.nproc_per_node != 1 or run.nnodes < 2:
        return None
    return (
        f"parallel.sharding_strategy is hybrid_shard on {run.nnodes} nodes with one process each: gradients would "
        "never be averaged between the nodes, and each node would train a different model."
    )


@error(
    "STR017",
    fields=("parallel.transformer_layer_cls_to_wrap",),
    title="The model has no layers of the class to wrap",
    source="accelerate 1.15 utils/dataclasses.py and fsdp_utils.py: could not find the transformer layer class",
    fixes=(
        Fix(
            "Detect the layer class",
            {"parallel.transformer_layer_cls_to_wrap": ()},
            cost="wraps the classes in the model's _no_split_modules",
        ),
    ),
    fails_on=Example(
        {**FSDP2_STRATEGY, "parallel.transformer_layer_cls_to_wrap": ("GPT2Block",)}, TWO_H100, LLAMA_CLASSES
    ),
    passes_on=Example(
        {**FSDP2_STRATEGY, "parallel.transformer_layer_cls_to_wrap": ("LlamaDecoderLayer",)}, TWO_H100, LLAMA_CLASSES
    ),
)
def unknown_class_to_wrap(case: Case) -> Violation | None:
    """FSDP gathers the parameters one wrapped layer at a time and finds the layers by their class names."""
    classes, wrapped = case.facts.module_classes, case.spec.parallel.transformer_layer_cls_to_wrap
    missing = [name for name in wrapped if classes and name not in classes]
    if not case.run.fsdp_version or not missing:
        return None
    layers = [name for name in classes if name.endswith(("Layer", "Block"))] or list(classes)
    fixes = (Fix(f"Wrap {layers[0]}", {"parallel.transformer_layer_cls_to_wrap": (layers[0],)}),) if layers else ()
    message = f"parallel.transformer_layer_cls_to_wrap lists {names(missing)}; the model has {names(layers[:4])}."
    return Violation(message, fixes)


@error(
    "STR024",
    fields=("save.only_model", "parallel.state_dict_type"),
    title="Sharded checkpoints cannot leave out the optimizer state",
    source="transformers 5.23 trainer.py: save_only_model is not compatible with SHARDED_STATE_DICT",
    fixes=(
        Fix(
            "Save a full state dict",
            {"parallel.state_dict_type": "full"},
            cost="gathers the weights in the host RAM of rank 0",
        ),
        Fix("Save the optimizer state too", {"save.only_model": False}, cost="larger checkpoints on disk"),
    ),
    fails_on=Example({**SHARDED, "save.only_model": True, "save.strategy": "epoch"}, TWO_H100),
    passes_on=Example(SHARDED, TWO_H100),
    proof="launch",
)
def sharded_checkpoints_without_optimizer(case: Case) -> str | None:
    """The Trainer writes sharded FSDP checkpoints only along with the optimizer state."""
    weights_only = case.spec.save.strategy != "no" and case.spec.save.only_model
    if not weights_only or case.run.checkpoint_format != "sharded":
        return None
    return "save.only_model is set, but parallel.state_dict_type is sharded: the Trainer refuses this combination."


def _has_mixed_unit(shape: ModelShape, trainable: list[str]) -> bool:
    """Whether an FSDP unit (a layer, or all modules outside the layers) has both trainable and frozen parameters."""
    units: dict[str, set[bool]] = {}
    names = frozenset(trainable)
    for leaf in shape.modules(names):
        in_layer = leaf.path.startswith(f"{shape.layers_path}.")
        unit = leaf.path[len(shape.layers_path) + 1 :].partition(".")[0] if in_layer else ""
        if leaf.parameters:
            units.setdefault(unit, set()).add(matches_any(leaf.path, names))
    return any(len(kinds) > 1 for kinds in units.values())


@error(
    "STR046",
    fields=("method.freeze_extra_modules", "parallel.strategy", "precision.compute"),
    title="FSDP1 cannot mix trainable and frozen parameters in one layer",
    source="torch 2.13 distributed/fsdp/_flat_param.py: Must flatten tensors with uniform dtype",
    fixes=(
        FSDP2,
        Fix(
            "Train complete layers only",
            {"method.freeze_extra_modules": ()},
            safe=False,
            cost="the extra modules stay frozen",
        ),
        Fix("Use fp32", {"precision.compute": "fp32"}, safe=False, cost="twice the memory, slower"),
    ),
    fails_on=Example({**FREEZE, "method.freeze_extra_modules": ("norm",)}, TWO_H100),
    passes_on=Example(FREEZE, TWO_H100),
)
def fsdp1_mixed_dtypes(case: Case) -> str | None:
    """FSDP1 flattens the parameters of a layer, and those outside the layers, into one tensor of one dtype. Trainable
    parameters are kept in fp32 and frozen ones in the compute dtype."""
    method, shape, run = case.spec.method, case.shape, case.run
    two_dtypes = run.compute_dtype != "fp32" and run.fp32_master_weights
    if run.fsdp_version != 1 or method.kind != "freeze" or shape is None or not two_dtypes:
        return None
    if case.spec.parallel.transformer_layer_cls_to_wrap or not _has_mixed_unit(shape, unfrozen_modules(method, shape)):
        return None
    return (
        f"A layer would have frozen parameters in {run.compute_dtype} and trainable parameters in fp32, which FSDP1 "
        "cannot flatten into one tensor."
    )


@error(
    "STR048",
    fields=("parallel.strategy",),
    title="FSDP2 cannot shard a module that several layers share",
    source="torch 2.13 distributed/fsdp/_fully_shard: Parameter ... is shared with a parameter already managed by "
    "another FSDP group; verified with Zamba",
    fixes=(ZERO3, DDP),
    fails_on=Example(FSDP2_STRATEGY, TWO_H100, replace(DEMO, has_shared_layers=True, model_type="zamba")),
    passes_on=Example(FSDP2_STRATEGY, TWO_H100),
)
def fsdp2_shared_layers(case: Case) -> str | None:
    """FSDP2 puts each decoder layer into a separate group. In this architecture several layers contain the same
    module, which would belong to more than one group."""
    if case.run.fsdp_version != 2 or not case.facts.has_shared_layers:
        return None
    return f"Several decoder layers of {case.facts.model_type} share a module, and the strategy is FSDP2."


@error(
    "STR072",
    fields=("parallel.strategy",),
    title="FSDP2 cannot shard an output layer that shares its bias",
    source="torch 2.13 distributed/fsdp/_fully_shard: Parameter ... is shared with a parameter already managed by "
    "another FSDP group; verified by running BERT as a decoder",
    fixes=(ZERO3, DDP),
    fails_on=Example(FSDP2_STRATEGY, TWO_H100, replace(DEMO, has_shared_head=True, model_type="bert-generation")),
    passes_on=Example(FSDP2_STRATEGY, TWO_H100, replace(DEMO, model_type="bert-generation")),
)
def fsdp2_shared_head(case: Case) -> str | None:
    """accelerate puts the output layer into one FSDP unit with the embedding and the norm before it. In this
    architecture, the module around the output layer, which belongs to another unit, has the same bias."""
    if case.run.fsdp_version != 2 or not case.facts.has_shared_head:
        return None
    return (
        f"In {case.facts.model_type}, the output layer shares its bias with another module, and the strategy is FSDP2."
    )


@error(
    "STR071",
    fields=("parallel.strategy", "method.kind"),
    title="FSDP2 cannot train the output layer without a norm before it",
    source="accelerate 1.15 utils/fsdp_utils.py, _find_final_norm: the norm and the output layer are one unit; "
    "verified by running OpenAI GPT and OPT-350M with tie_word_embeddings false",
    fixes=(ZERO3, DDP),
    fails_on=Example(UNTIED_FULL, TWO_H100, replace(DEMO, shape=WITHOUT_LAST_NORM)),
    passes_on=Example(UNTIED_FULL, TWO_H100, replace(DEMO, shape=UNTIED)),
)
def fsdp2_output_layer_without_norm(case: Case) -> str | None:
    """accelerate puts the output layer into one FSDP unit with the norm before it, which is gathered when the norm is
    called. Some models have no such norm, or have it in another module, where accelerate does not look for it. The loss
    would read the output layer while it is sharded, and each rank would train it on its own examples only."""
    shape = case.shape
    if case.run.fsdp_version != 2 or shape is None or shape.tied:
        return None
    is_absent = _has_norm(shape.layer) and not _has_norm(shape.non_layer_modules)
    head = shape.non_layer_modules[-1]
    if not (is_absent or case.model_types & registry.NESTED_NORM) or head not in trained_modules(case.spec, shape):
        return None
    return f"accelerate finds no norm before {head.path} in {shape.architecture}, and the strategy is FSDP2."


def _has_norm(modules: Sequence[ModuleSpec]) -> bool:
    """Whether one of the modules is a norm, with a weight and perhaps a bias for each element."""
    return any((not each.out_features and "norm" in each.path) or ".ln_" in f".{each.path}" for each in modules)
