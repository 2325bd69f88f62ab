"""The optimizer: what the Trainer is told of it, the ones that it does not know, and what it loses of those it knows.

Beside the floors. Imports spec, catalog, inside, journal.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from backend import registry
from backend.config import RunSpec
from backend.train import optimizer_utils
from backend.train.run_log import TrainError

MODULES = {"transformer-engine": "transformer_engine", "torch-optimi": "optimi"}  # where the name is another


def check(spec: RunSpec, family: str) -> None:
    """Raise TrainError for what a library would refuse in words of its own, or do wrong without a word."""
    train, row = spec.train, registry.OPTIMIZERS[spec.train.optim]
    name, strategy = row.label, registry.STRATEGIES[spec.parallel.strategy]
    masters = registry.PRECISIONS[spec.precision.compute].fp32_master_weights
    engine, first = strategy.engine, strategy.fsdp_version == 1
    alone = not engine or (engine == "ddp" and spec.launch.nproc_per_node == 1)
    refused = {
        f"train.optim: {name} needs the package {row.package}: pip install {row.package}": row.package
        and not there(row.package),
        f"train.optim: {name} does not run on {registry.DEVICES[family].label}.": row.devices
        and family not in row.devices,
        f"train.optim: {name} needs whole matrices; {strategy.label} hands it flat parts.": row.state_layout
        and (engine == "deepspeed" or first),
        f"train.optim: DeepSpeed makes {name} anew with one group of weights; here are several.": row.allocates_state_at_init
        and strategy.zero_stage > 0
        and spec.has_param_groups,
        f"train.optim: {name} averages weights, and DeepSpeed does not tell it when.": row.swaps_weights_for_eval
        and engine == "deepspeed",
        f"train.optim: {name} does not take the weights that this strategy spreads.": row.needs_plain_tensors(masters)
        and engine in ("fsdp", "tensor")
        and not first,
        f"train.optim: {name} works in one process alone: set parallel.strategy to single.": not alone
        and (row.steps_in_backward or row.state_layout == "one_block"),
        f"train.gradient_accumulation_steps: {name} steps with every batch, so nothing adds up: set it to 1.": row.steps_in_backward
        and train.gradient_accumulation_steps > 1,
        f"precision.compute: {name} would step by fp16's scaled gradients: take bf16 or fp32.": row.steps_in_backward
        and spec.precision.compute == "fp16",
        f"method.kind: {name} divides whole matrices into heads, and adapters are none.": row.state_layout == "per_head"
        and spec.method.kind == "lora",
        "train.optim_target_modules is empty: name parts of module names, such as attn, mlp.": row.state_layout == "low_rank"
        and train.optim_targets == "custom"
        and not train.optim_target_modules,
    }
    if words := next((words for words, holds in refused.items() if holds), ""):
        raise TrainError(words)


def there(package: str) -> bool:
    """Whether a distribution can be imported."""
    return importlib.util.find_spec(MODULES.get(package, package.replace("-", "_"))) is not None


def arguments(spec: RunSpec) -> dict[str, Any]:
    """The Trainer's arguments that belong to the optimizer."""
    train, row = spec.train, registry.OPTIMIZERS[spec.train.optim]
    told = dict(row.arguments)
    if "momentum" in row.reads:
        told["momentum"] = str(train.momentum)
    if row.state_layout == "low_rank":
        told |= {"rank": str(train.projection_rank), "update_proj_gap": str(train.update_proj_gap)}
    if "galore_scale" in row.reads:
        told |= {"scale": str(train.galore_scale), "proj_type": train.galore_proj_type}
    if "apollo_scale" in row.reads:
        told |= {"scale": str(train.apollo_scale), "proj": train.apollo_proj, "scale_type": train.apollo_scale_type}
    if "rank" in told:
        _let_projectors_load()
    if row.compiled and not registry.PRECISIONS[spec.precision.compute].fp32_master_weights:
        told["bf16_stochastic_round"] = "True"
    # What an optimizer does not read is hidden on the page, and holds its default here.
    return {
        "optim": row.trainer_optim or "adamw_torch",
        "optim_args": ",".join(f"{name}={value}" for name, value in told.items()) or None,
        "optim_target_modules": _targets(spec) if row.state_layout == "low_rank" else None,
        "lr_scheduler_type": train.lr_scheduler_type if "lr_scheduler_type" in row.reads else "constant",
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm if "max_grad_norm" in row.reads else 0.0,
    }


def _targets(spec: RunSpec) -> str | list[str]:
    targets = spec.train.optim_targets
    if targets == "custom":
        return list(spec.train.optim_target_modules)
    return ["attn", "attention"] if targets == "attention" else "all-linear"


def _let_projectors_load() -> None:
    """A projection stands in checkpoints as an object, and torch loads only those that it was told of."""
    for module, name in (
        ("galore_torch.galore_projector", "GaLoreProjector"),
        ("apollo_torch.svd_projector", "GaLoreProjector"),
        ("apollo_torch.random_projector", "GradientProjector"),
    ):
        if there(module.partition(".")[0]):
            torch.serialization.add_safe_globals([getattr(importlib.import_module(module), name)])


class Optimizing:
    """Laid over a Trainer: makes the optimizers that it does not know, and mends the ways of those that it knows."""

    spec: RunSpec

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of the spec."""
        trainer: Any = self
        row = registry.OPTIMIZERS[self.spec.train.optim]
        if trainer.optimizer is None:
            chosen = trainer.model if model is None else model
            decaying = set(trainer.get_decay_parameter_names(chosen))
            if row.trainer_optim:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "This implementation of AdamW is deprecated")  # GaLore's copy
                    with _projecting(chosen):
                        super().create_optimizer(model)  # type: ignore[misc]
            else:
                trainer.optimizer = MAKERS[self.spec.train.optim](self.spec, chosen, decaying)
            if row.allocates_state_at_init:  # it is of weights that an engine replaces; the first step makes it anew
                optimizer_utils.innermost(trainer.optimizer).state.clear()
            if row.state_layout == "low_rank":
                _regroup(self.spec, trainer.optimizer, chosen, decaying)
                if row.steps_in_backward:
                    _step_within_backward(trainer.optimizer)
        return trainer.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A schedule-free optimizer warms up by itself, and would take a share of all steps for a number of steps."""
        trainer: Any = self
        for group in trainer.optimizer.param_groups:
            if "warmup_steps" in group:
                group["warmup_steps"] = trainer.args.get_warmup_steps(num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def settle(self) -> None:
        """Let a schedule-free optimizer put its average into the weights: that is what was learned."""
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        if hasattr(optimizer, "eval"):
            optimizer.eval()

    def _load_from_checkpoint(self, *args: Any, **more: Any) -> None:
        """peft 0.21 widens adapters that it loads to fp32, whatever they were."""
        trainer: Any = self
        kinds = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
        super()._load_from_checkpoint(*args, **more)  # type: ignore[misc]
        for name, parameter in trainer.model.named_parameters():
            if parameter.dtype != kinds[name]:
                parameter.data = parameter.data.to(kinds[name])

    def _save_checkpoint(self, *args: Any) -> None:
        self.settle()
        super()._save_checkpoint(*args)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self.settle()  # before, since it must not touch the weights that come
        super()._load_best_model()  # type: ignore[misc]


def _named(model: Any) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _groups(spec: RunSpec, named: list[tuple[str, nn.Parameter]], decaying: set[str]) -> list[dict[str, Any]]:
    """Weights that decay, and those that do not: norms and biases."""
    kinds = [(spec.train.weight_decay, True), (0.0, False)]
    groups = [
        {"params": [p for name, p in named if (name in decaying) is decays], "weight_decay": decay}
        for decay, decays in kinds
    ]
    return [group for group in groups if group["params"]]


def _adam(spec: RunSpec) -> dict[str, Any]:
    train = spec.train
    return {"lr": train.learning_rate, "betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}


def _regroup(spec: RunSpec, optimizer: Any, model: Any, decaying: set[str]) -> None:
    """The Trainer makes projected groups without weight decay, and most without betas; frozen weights are in them."""
    row, groups = registry.OPTIMIZERS[spec.train.optim], []
    more = {} if row.factored else _adam(spec)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        named = [(names[id(p)], p) for p in group["params"] if p.requires_grad]
        groups += [{**group, **more, **part} for part in _groups(spec, named, decaying)]
    if not any("rank" in group for group in groups):
        raise _unprojected(model)
    optimizer.param_groups = groups


def _unprojected(model: Any) -> TrainError:
    return TrainError(f"train.optim_targets: {type(model).__name__} has no such linear layers to project.")


@contextmanager
def _projecting(model: Any) -> Iterator[None]:
    """The Trainer's words for a model without the layers that were named, turned into ours."""
    try:
        yield
    except ValueError as error:
        if "No target modules" not in str(error):
            raise
        raise _unprojected(model) from None


def _step_within_backward(optimizer: Any) -> None:
    """Step as soon as a gradient is there, and free it: all others are None then, and are left alone.

    The Trainer's own layer-wise optimizers keep their state from checkpoints and their schedule from the curves.
    """
    step: Callable[[], Any] = optimizer.step

    def use(parameter: nn.Parameter) -> None:
        step()
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(use)
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)


class Muon(torch.optim.Optimizer):
    """torch's Muon for the matrices of the layers and AdamW for all else, as one optimizer with one state."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        matrices = [group for group in self.param_groups if group["orthogonal"]]
        others = [group for group in self.param_groups if not group["orthogonal"]]
        self.parts = [
            kind(groups) for kind, groups in ((torch.optim.Muon, matrices), (torch.optim.AdamW, others)) if groups
        ]
        for part, groups in zip(self.parts, filter(None, (matrices, others)), strict=True):
            part.param_groups, part.state = groups, self.state

    def step(self, closure: Any = None) -> None:
        """A step of both."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Both go on from one state."""
        super().load_state_dict(state_dict)
        self._share()


def _muon(spec: RunSpec, model: Any, decaying: set[str]) -> Any:
    ends = [id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    named = _named(model)
    # One row is no matrix: a reward's head, an adapter of rank 1.
    inner = {name for name, p in named if p.ndim == 2 and min(p.shape) > 1 and id(p) not in ends}
    matrices, others = ([(n, p) for n, p in named if (n in inner) is kind] for kind in (True, False))
    rate = {"lr": spec.train.learning_rate}
    # Moonshot's factor: steps as large as AdamW's, so that one learning rate serves both.
    own = {"momentum": spec.train.momentum, "adjust_lr_fn": "match_rms_adamw", **rate}
    adam = {"orthogonal": False, **_adam(spec)}
    return Muon(
        [
            *({"orthogonal": True, **own, **group} for group in _groups(spec, matrices, decaying)),
            *({**adam, **group} for group in _groups(spec, others, decaying)),
        ]
    )


def _adam_mini(spec: RunSpec, model: Any, decaying: set[str]) -> Any:
    package: Any = importlib.import_module("adam_mini")
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    made = package.Adam_mini(
        named_parameters=_named(model),
        **_adam(spec),
        weight_decay=spec.train.weight_decay,
        dim=config.hidden_size,
        n_heads=heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        verbose=False,
    )
    made.head_numel = config.hidden_size * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return made


def _badam(spec: RunSpec, model: Any, decaying: set[str]) -> Any:
    package: Any = importlib.import_module("badam")

    class Blocks(package.BlockOptimizer):
        """BAdam whose checkpoints hold all that it goes on from, not only the moments of the present layer."""

        def switch_trainable_params(self, verbose: int | None = 0) -> None:
            """To the next layer, without a line of the log each time."""
            self.active = self.current_block_idx
            super().switch_trainable_params(0)

        def whole(self) -> dict[str, Any]:
            """Moments, masters, the rate, and whose turn it is."""
            return {
                "base": self.base_optimizer.state_dict(),
                "masters": list(self.param_idx2hp.values()),
                "rate": self.param_groups[0]["lr"],
                "step": self.global_step,
                "active": self.active,
                "next": self.current_block_idx,
                "order": list(getattr(self, "block_order", [])),
            }

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Go on with the same layer."""
            self.current_block_idx = state_dict["active"]
            self.block_order = [0, *state_dict["order"]]  # one is taken by the switch
            self.switch_trainable_params()
            self.base_optimizer.load_state_dict(state_dict["base"])
            for master, kept in zip(self.param_idx2hp.values(), state_dict["masters"], strict=True):
                master.data.copy_(kept.data)
            self.current_block_idx, self.block_order = state_dict["next"], list(state_dict["order"])
            self.global_step = state_dict["step"]
            for group in self.param_groups:
                group["lr"] = state_dict["rate"]

    named, depth = _named(model), model.config.get_text_config().num_hidden_layers
    stacks = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    blocks = [[f"{stacks[0]}.{number}."] for number in range(depth)] if stacks else []
    blocks = [block for block in blocks if any(block[0] in name for name, _ in named)]
    if not blocks:
        raise TrainError(f"train.optim: {type(model).__name__} has no list of layers for BAdam to take in turns.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the names of all weights that are fp32, in one line
        base = torch.optim.AdamW(_groups(spec, named, decaying), **_adam(spec))
        made = Blocks(
            base,
            named,
            blocks,
            switch_block_every=spec.train.badam_switch_block_every,
            switch_mode=spec.train.badam_switch_mode,
            verbose=0,
        )
    made.state_dict = made.whole  # its own constructor put the base's there
    return made


MAKERS: Mapping[str, Callable[[RunSpec, Any, set[str]], Any]] = {
    "muon": _muon,
    "adam_mini": _adam_mini,
    "badam": _badam,
}
