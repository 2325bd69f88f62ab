"""The optimizer: its TrainingArguments, the optimizers that the Trainer does not have, and the state on this rank."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from backend import registry
from backend.config import RunSpec
from backend.registry import adam_mini
from backend.train import resumed_options
from backend.train.decoder_layers import outermost_layers
from backend.train.patches import (
    adam_mini_head_size,
    badam_checkpoint,
    low_rank_optimizers,
    schedule_free,
    torch_dtensor_cache_key,
    torch_state_dtype,
)
from backend.train.run_log import TrainError

NamedParameters = list[tuple[str, nn.Parameter]]
NO_DECAY = ("A_log", "D", "sinks")  # names in state-space models, whose authors exclude them, and in attention


def arguments(spec: RunSpec) -> dict[str, Any]:
    """The TrainingArguments that belong to the optimizer."""
    train, row = spec.train, registry.OPTIMIZERS[spec.train.optim]
    optim_args = dict(row.arguments)
    if "momentum" in row.reads:
        optim_args["momentum"] = str(train.momentum)
    if row.state_layout == "low_rank":
        optim_args |= {"rank": str(train.projection_rank), "update_proj_gap": str(train.update_proj_gap)}
    if "galore_scale" in row.reads:
        optim_args |= {"scale": str(train.galore_scale), "proj_type": train.galore_proj_type}
    if "apollo_scale" in row.reads:
        optim_args |= {
            "scale": str(train.apollo_scale),
            "proj": train.apollo_proj,
            "scale_type": train.apollo_scale_type,
        }
    if "rank" in optim_args:
        low_rank_optimizers.allow_projectors()
    if row.compiled and not spec.fp32_master_weights:
        optim_args["bf16_stochastic_round"] = "True"
    # Options that an optimizer does not read are hidden on the page; they must have no effect here.
    return {
        "optim": row.trainer_optim or "adamw_torch",
        "optim_args": ",".join(f"{name}={value}" for name, value in optim_args.items()) or None,
        "optim_target_modules": _target_modules(spec) if row.state_layout == "low_rank" else None,
        "lr_scheduler_type": train.lr_scheduler_type if "lr_scheduler_type" in row.reads else "constant",
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm if "max_grad_norm" in row.reads else 0.0,
    }


def _target_modules(spec: RunSpec) -> str | list[str]:
    targets = spec.train.optim_targets
    if targets == "custom":
        return list(spec.train.optim_target_modules)
    return ["attn", "attention"] if targets == "attention" else "all-linear"


class OptimizerMixin:
    """Added to a Trainer class: creates the optimizers that it does not have, and applies the patches of others."""

    spec: RunSpec

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.configured: list[dict[str, Any]] = []  # options of each parameter group; a copy of the trainer shares it
        super().__init__(*arguments, **more)

    def get_decay_parameter_names(self: Any, model: Any) -> list[str]:
        """The names of parameters with weight decay, without those of norms: transformers 5.23 knows only norms with
        names such as norm and input_layernorm."""
        spared = {
            f"{path}.{name}"
            for path, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
            if name in NO_DECAY or "norm" in type(module).__name__.lower()
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in spared]  # type: ignore[misc]

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of the spec."""
        trainer: Any = self
        row = registry.OPTIMIZERS[self.spec.train.optim]
        if trainer.optimizer is None:
            trained = trainer.model if model is None else model
            decaying = set(trainer.get_decay_parameter_names(trained))
            if row.trainer_optim:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "This implementation of AdamW is deprecated")  # GaLore's AdamW
                    super().create_optimizer(model)  # type: ignore[misc]
            else:
                trainer.optimizer = MAKERS[self.spec.train.optim](self.spec, trained, decaying)
            torch_state_dtype.apply(unwrap(trainer.optimizer))
            if row.compiled:
                torch_dtensor_cache_key.apply()
            if row.allocates_state_at_init:
                recreatable(unwrap(trainer.optimizer))
            if row.state_layout == "low_rank":
                split = partial(_groups, self.spec, decaying=decaying)
                options = {} if row.factored else _adam_options(self.spec)
                if not low_rank_optimizers.rebuild_groups(trainer.optimizer, trained, split, options):
                    raise TrainError(
                        "train.optim_targets: all linear layers that the optimizer would project are frozen. Set it to "
                        "all-linear, or train more layers."
                    )
                if row.steps_in_backward:
                    low_rank_optimizers.step_in_backward(trainer.optimizer)
        return trainer.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler; schedule-free optimizers warm up themselves."""
        trainer: Any = self
        warmup = trainer.args.get_warmup_steps(num_training_steps)
        schedule_free.set_warmup_steps(trainer.optimizer, warmup)
        name = str(trainer.args.lr_scheduler_type.value)
        trainer.args.lr_scheduler_kwargs = registry.scheduler_arguments(name, num_training_steps, warmup)
        scheduler = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        self.configured[:] = resumed_options.read(unwrap(scheduler.optimizer))
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        schedule_free.allow_step(trainer.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            resumed_options.apply(unwrap(trainer.optimizer), trainer.lr_scheduler, self.configured)

    def finalize_weights(self) -> None:
        """Put the trained weights into the model: a schedule-free optimizer trains on other weights."""
        schedule_free.use_average(self.optimizer)  # type: ignore[attr-defined]

    def _save_checkpoint(self, *args: Any) -> None:
        self.finalize_weights()
        super()._save_checkpoint(*args)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self.finalize_weights()  # before loading, because it must not change the loaded weights
        super()._load_best_model()  # type: ignore[misc]


def recreatable(optimizer: Any) -> None:
    """Prepare an optimizer for engines that replace the parameters for which it already has state, or that create it
    again from its defaults, as DeepSpeed does with Adagrad. The Trainer gives weight decay to the groups only; if there
    are several, a rule refuses the strategy."""
    optimizer.state.clear()  # the first step allocates it again
    optimizer.defaults["weight_decay"] = optimizer.param_groups[0]["weight_decay"]


def unwrap(optimizer: Any) -> Any:
    """The optimizer without the wrappers of accelerate and of an engine."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def state_summary(optimizer: Any) -> dict[str, Any]:
    """The class of the optimizer, and the bytes of its state on this rank."""
    inner = unwrap(optimizer)
    base = getattr(inner, "base_optimizer", inner)
    sizes: dict[int, int] = {}
    for tensor in _tensors([base.state, [group.get("state") for group in base.param_groups]]):
        sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    masters = getattr(inner, "param_idx2hp", {}).values()  # BAdam's master weights
    kind = type(inner)
    return {
        "class": f"{kind.__module__}.{kind.__name__}",
        "bytes": sum(sizes.values()) + sum(m.numel() * m.element_size() for m in masters),
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor within dicts, lists, quantized tensors and projectors."""
    if isinstance(value, torch.Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        if parts:
            yield from _tensors([getattr(value, name) for name in parts])
        else:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "ortho_matrix"):
        yield from _tensors(value.ortho_matrix)


def _trainable(model: Any) -> NamedParameters:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _groups(spec: RunSpec, named: NamedParameters, decaying: set[str]) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay; norms and biases have none."""
    kinds = [(spec.train.weight_decay, True), (0.0, False)]
    groups = [
        {"params": [p for name, p in named if (name in decaying) is decays], "weight_decay": decay}
        for decay, decays in kinds
    ]
    return [group for group in groups if group["params"]]


def _adam_options(spec: RunSpec) -> dict[str, Any]:
    train = spec.train
    return {"lr": train.learning_rate, "betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}


class Muon(torch.optim.Optimizer):
    """torch's Muon for the matrices of the layers and AdamW for all other parameters, as one optimizer."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._share_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as LoRA+ does, to the optimizer that it belongs to."""
        super().add_param_group(param_group)
        if hasattr(self, "parts"):
            self._share_state()

    def _share_state(self) -> None:
        matrices = [group for group in self.param_groups if group["orthogonal"]]
        others = [group for group in self.param_groups if not group["orthogonal"]]
        self.parts = [
            kind(groups) for kind, groups in ((torch.optim.Muon, matrices), (torch.optim.AdamW, others)) if groups
        ]
        for part, groups in zip(self.parts, filter(None, (matrices, others)), strict=True):
            part.param_groups, part.state = groups, self.state

    def step(self, closure: Any = None) -> None:
        """Step both optimizers."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of both."""
        super().load_state_dict(state_dict)
        self._share_state()


def _muon(spec: RunSpec, model: Any, decaying: set[str]) -> Any:
    ends = [id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    named = _trainable(model)
    # A single row is not a matrix: the head of a reward model, an adapter of rank 1.
    inner = {name for name, p in named if p.ndim == 2 and min(p.shape) > 1 and id(p) not in ends}
    matrices, others = ([(n, p) for n, p in named if (n in inner) is kind] for kind in (True, False))
    # match_rms_adamw: updates as large as AdamW's, so that one learning rate fits both.
    muon = {"momentum": spec.train.momentum, "adjust_lr_fn": "match_rms_adamw", "lr": spec.train.learning_rate}
    adam = {"orthogonal": False, **_adam_options(spec)}
    return Muon(
        [
            *({"orthogonal": True, **muon, **group} for group in _groups(spec, matrices, decaying)),
            *({**adam, **group} for group in _groups(spec, others, decaying)),
        ]
    )


def _adam_mini(spec: RunSpec, model: Any, decaying: set[str]) -> Any:
    package: Any = importlib.import_module("adam_mini")
    config = model.config.get_text_config()
    optimizer = package.Adam_mini(
        named_parameters=_adam_mini_names(model),
        **_adam_options(spec),
        weight_decay=spec.train.weight_decay,
        **adam_mini_head_size.sizes(config),
        verbose=False,
    )
    adam_mini_head_size.apply(optimizer, config)
    for (name, weight), group in zip(_trainable(model), optimizer.param_groups, strict=True):
        group["weight_decay"] = spec.train.weight_decay if name in decaying else 0.0  # Adam-mini decides by names
        dimensions = 1 if _is_vector(weight) else weight.dim()
        if problem := adam_mini.problem(name, dimensions, weight.numel(), optimizer.head_numel):
            raise TrainError(f"train.optim: Adam-mini cannot train {name}, which {problem}. Use another optimizer.")
    return optimizer


def _adam_mini_names(model: Any) -> NamedParameters:
    """Adam-mini decides by names what to divide into heads or rows, and fails where such a name belongs to a vector,
    for example to the norm final_layer_norm. Vectors get names for which it keeps one second moment."""

    def described(name: str, weight: nn.Parameter) -> str:
        if not _is_vector(weight) or "bias" in name:
            return name
        return "norm" if "norm" in name or "ln" in name else "vector"

    return [(described(name, weight), weight) for name, weight in _trainable(model)]


def _is_vector(weight: nn.Parameter) -> bool:
    """Whether a weight is a vector. RWKV's have two more dimensions, of size 1."""
    return len(weight.shape) != 2 and sum(size > 1 for size in weight.shape) < 2


def _badam(spec: RunSpec, model: Any, decaying: set[str]) -> Any:
    named = _trainable(model)
    blocks = [[f"{layer}."] for layer in outermost_layers(model)]
    blocks = [block for block in blocks if any(block[0] in name for name, _ in named)]
    if not blocks:
        raise TrainError(
            f"train.optim: BAdam trains one layer after another, but {type(model).__name__} has no list of trainable "
            "layers. Use another optimizer."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would name all fp32 parameters in one line
        return badam_checkpoint.block_optimizer(
            partial(_groups, spec, decaying=decaying),
            torch.optim.AdamW(_groups(spec, named, decaying), **_adam_options(spec)),
            named,
            blocks,
            switch_block_every=spec.train.badam_switch_block_every,
            switch_mode=spec.train.badam_switch_mode,
            verbose=0,
        )


MAKERS: Mapping[str, Callable[[RunSpec, Any, set[str]], Any]] = {
    "muon": _muon,
    "adam_mini": _adam_mini,
    "badam": _badam,
}
