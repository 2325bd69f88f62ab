"""What the importers of other tools' configuration files share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import Problem, SpecError, effective, get
from backend.config.outputs import NAME_LENGTH
from backend.config.suggestions import closest
from backend.engines import fsdp_keys

Table = Mapping[str, Any]
NO_EFFECT: tuple[Any, ...] = (None, False, "", "none", 0, [], {})
# Other names of the Trainer's optimizers (transformers 5.23 training_args.py: OptimizerNames).
OPTIMIZER_NAMES = {"adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit", "lion": "lion_32bit"}
MISSPELLED = 0.85  # difflib ratio from which a key that no importer reads is one that it reads, misspelled
STRATEGIES = ("no", "steps", "epoch")
INTERVALS = ("save", "logging", "eval")
OPTION_OF_SCHEDULE = "train.lr_scheduler_type"
NOT_OFFLOADED = "(?<![a-z])(no|non|without)[_-]?(cpu[_-]?)?offload"  # in the name of a DeepSpeed file
SAMPLING = "train.train_sampling_strategy"
# Values of their settings for which Footplate has no option, because it does the same.
SAME_VALUES: Mapping[str, tuple[Any, ...]] = {
    "metric_for_best_model": ("loss", "eval_loss"), "packing_strategy": ("bfd",),
}  # fmt: skip
# What these tools do not limit or turn off with 0 or less -> the value that does so here. Sources: transformers 5.23
# trainer_utils.py, rotate_checkpoints, and trainer.py; datasets 4, map; axolotl's utils/schemas/validation.py.
UNLIMITED: Mapping[str, int] = {
    "save.total_limit": 0, "train.max_grad_norm": 0, "data.dataset_num_proc": 1, "parallel.context_parallel_size": 1,
    "parallel.replicate_size": 1,
}  # fmt: skip
# Switches of these tools that are on unless a file turns them off.
ON_BY_DEFAULT = {"average_tokens_across_devices", "shuffle_merged_datasets"}
# Keys without an option -> what there is instead.
INSTEAD: Mapping[str, str] = {
    "push_to_hub": "footplate publish uploads a finished run",
    "hub_model_id": "footplate publish uploads a finished run",
    "eos_token": "Footplate takes the end token from the chat template",
}

TENSOR_WITH_FSDP = (
    "fsdp_config: with tensor parallelism, Footplate uses FSDP2's usual settings to shard over the groups "
    "(parallel.strategy: tensor)"
)


@dataclass(frozen=True)
class Imported:
    """A spec from another tool's file: dotted keys that were `kept` in the extra config, keys that have a `different`
    meaning in Footplate, and those that are `missing`, as sentences."""

    spec: RunSpec
    kept: Sequence[str] = ()
    different: Sequence[str] = ()
    missing: Sequence[str] = ()


@dataclass
class Import:
    """What became of a file: a patch of options, `different` meanings and keys `missing` in Footplate, as sentences."""

    table: Table
    base: Path  # what relative paths in the file are relative to
    tool: str
    defaults: Table  # the tool's defaults for keys that a file leaves out, so that the same training starts
    patch: dict[str, Any] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # keys of the file that were read
    keys: dict[str, str] = field(default_factory=dict)  # option -> the key of the file that has set it

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the file, or the tool's default."""
        self.read.add(key)
        found = self.table.get(key)
        return self.defaults.get(key, default) if found is None else found

    def number(self, key: str, default: float = 0) -> float:
        """A value that must be a number. Raises SpecError."""
        value = self.get(key, default)
        try:
            return float(value) if float(value) % 1 else int(float(value))
        except (TypeError, ValueError, OverflowError):
            raise SpecError([Problem("", f"{key} must be a number, not {value!r}")]) from None

    def fail(self, key: str, value: Any, known: str) -> SpecError:
        """The error for a training that has no counterpart at all."""
        return SpecError([Problem("", f"{key}: {value} of {self.tool} has no counterpart; {known}")])

    def take_over(self, same: Mapping[str, str]) -> None:
        """Options with the same meaning under another or the same name: key in the file -> option."""
        for key, option in same.items():
            if (value := self.get(key)) is not None:
                if option in UNLIMITED and isinstance(value, int | float) and value <= 0:
                    value = UNLIMITED[option]
                self.set(key, option, self._short(key, value) if option == "logging.run_name" else value)

    def _short(self, key: str, name: Any) -> str:
        """The name of a run, which is part of a folder's name here. The tools have no limit."""
        if len(text := str(name)) > NAME_LENGTH:
            self.different.append(f"{key}: only the first {NAME_LENGTH} characters are imported, the most of a name")
        return text[:NAME_LENGTH]

    def set(self, key: str, option: str, value: Any) -> None:
        """Set an option because of a key."""
        self.patch[option] = value
        if self.table.get(key) is not None:
            self.keys[option] = key

    def name_without_effect(self, spec: RunSpec) -> None:
        """Note the keys whose options have no effect in `spec`, which the file has become."""
        now = effective(spec)
        lost = {key: option for option, key in self.keys.items() if get(now, option) != get(spec, option)}
        self.missing += [
            f"{key}: {self.table.get(key, self.patch[option])} ({option} has no effect with the other options)"
            for key, option in lost.items()
        ]

    def name_missing(self, ignored: Collection[str]) -> dict[str, Any]:
        """Note the keys that were not read, and return them; `ignored` are those without an effect on the training."""
        unread = {key: value for key, value in self.table.items() if key not in self.read and key not in ignored}
        left = {
            key: value
            for key, value in unread.items()
            if (value is False if key in ON_BY_DEFAULT else value not in (*NO_EFFECT, *SAME_VALUES.get(key, ())))
        }
        for key, value in left.items():
            similar = self._misspelled(key)
            why = INSTEAD.get(key) or (f"did you mean {similar}?" if similar else "")
            self.missing.append(f"{key}: {value} ({why})" if why else f"{key}: {value}")
        return left

    def _misspelled(self, key: str) -> str:
        """The key that an importer reads, the file lacks, and `key` is most likely meant to be; '' for none. Keys with
        more or fewer words, such as use_unsloth and use_unsloth_gc, are different ones."""
        names = [name for name in self.read - self.table.keys() if name.count("_") == key.count("_")]
        return closest(key, names, MISSPELLED)

    def model(self, key: str) -> None:
        """A folder or a name on the Hugging Face Hub."""
        name = str(self.get(key))
        if is_path(name) or (self.base / name).is_dir():
            self.patch |= {"model.source": "path", "model.path": name}
        else:
            self.patch |= {"model.source": "hub", "model.hub_id": name}

    def targets(self, key: str) -> None:
        """The modules that get LoRA adapters."""
        modules = words(self.get(key))
        if modules == ["all-linear"]:
            self.patch["lora.targets"] = "all-linear"
        elif not all(re.fullmatch(r"[\w.-]+", name) for name in modules):
            text = "a regular expression: all linear layers get adapters unless you name others in lora.target_modules"
            self.missing.append(f"{key}: {self.get(key)} ({text})")
            self.patch["lora.targets"] = "all-linear"
        elif modules:
            self.patch |= {"lora.targets": "custom", "lora.target_modules": modules}
        else:
            self.different.append(f"{key}: PEFT's default for the model in {self.tool}, all linear layers in Footplate")

    def choose(
        self, key: str, option: str, known: Collection[str], names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """A value of `key` that the option has too, under Footplate's name for it; otherwise the option keeps its
        default."""
        name = str(self.get(key))
        if (name := names.get(name, name)) in known:
            self.set(key, option, name)
        else:
            self.missing.append(f"{key}: {name} ({option} keeps its default)")

    def schedule(self, key: str) -> None:
        """The learning rate schedule, also under names that transformers has for the same one: one cosine, and a
        polynomial of degree 1."""
        name, given = str(self.get(key)), self.table.get("lr_scheduler_kwargs") or {}
        known = given if isinstance(given, Mapping) else {}
        same = {"cosine_with_restarts": ("num_cycles", "cosine"), "polynomial": ("power", "linear")}
        argument, own = same.get(name, ("", ""))
        if not own or known.get(argument, 1) != 1 or not {*known} <= {argument, "lr_end"}:
            return self.choose(key, OPTION_OF_SCHEDULE, registry.SCHEDULERS)
        self.set(key, OPTION_OF_SCHEDULE, own)
        self.read |= {"lr_scheduler_kwargs"} if known else set()
        if own == "linear" and (end := known.get("lr_end", 1e-7)):
            self.different.append(f"{key}: polynomial: the learning rate falls to 0 in Footplate, and to {end} there")

    def duration(self, key: str) -> None:
        """Optimizer steps, if `key` is positive, or epochs."""
        steps = self.number(key, -1)
        epochs = self.patch.get("train.num_train_epochs")
        if steps > 0 and isinstance(epochs, int | float) and epochs <= 0:
            del self.patch["train.num_train_epochs"]  # it has no effect
        self.patch |= (
            {"train.duration": "steps", "train.max_steps": steps} if steps > 0 else {"train.duration": "epochs"}
        )

    def strategy(self, what: str) -> str:
        """The strategy of save or eval. YAML reads an unquoted no as false."""
        return str(self.get(f"{what}_strategy", "no") or "no")

    def intervals(self, evaluates: bool) -> None:
        """When the run saves, evaluates and logs. Source: transformers 5.23 training_args.py, __post_init__."""
        for what in ("save", "eval"):
            if (name := self.strategy(what)) not in STRATEGIES:
                self.different.append(f"{what}_strategy: {name}: Footplate does this once per epoch")
                name = "epoch"
            self.patch[f"{what}.strategy"] = name
        steps = {what: self.number(f"{what}_steps", 500 if what == "logging" else 0) for what in INTERVALS}
        if not evaluates:
            self.patch["eval.strategy"] = "no"
        elif self.patch["eval.strategy"] == "steps":
            steps["eval"] = self.patch["eval.steps"] = steps["eval"] or steps["logging"]
        self._without_zero(steps)
        for what in (what for what, number in steps.items() if 0 < number < 1):
            self.patch.pop(f"{what}.steps", None)
            if self.patch.get(f"{what}.strategy", "steps") != "steps":
                continue  # the Trainer does not use the number
            if what != "logging":
                self.patch[f"{what}.strategy"] = "epoch"
            rest = "" if what == "logging" else "Footplate does this once per epoch; "
            text = f"{rest}set {what}.steps for another interval"
            self.different.append(f"{what}_steps: {steps[what]:g}, a share of all steps: {text}")

    def _without_zero(self, steps: Mapping[str, float]) -> None:
        """Take out intervals of 0 steps: the Trainer then saves at the end only (trainer_callback.py)."""
        for what in (what for what in ("save", "eval") if not steps[what]):
            self.patch.pop(f"{what}.steps", None)
        if not steps["save"] and self.patch["save.strategy"] == "steps":
            self.patch["save.strategy"] = "no"

    def trainer_arguments(self) -> None:
        """Arguments of the Trainer that these tools pass on to it."""
        by_length = bool(self.get("group_by_length"))  # its name in transformers before 5
        sampling = str(self.get("train_sampling_strategy", "group_by_length" if by_length else "random"))
        if sampling in ("random", "group_by_length"):
            self.set("group_by_length" if by_length else "train_sampling_strategy", SAMPLING, sampling)
        else:
            self.missing.append(f"train_sampling_strategy: {sampling} (the order is random)")
        if self.get("use_cpu"):
            self.set("use_cpu", "launch.device", "cpu")
        self._schedule_arguments()

    def _schedule_arguments(self) -> None:
        """Mark the arguments of the schedule as read if Footplate's schedule has the same."""
        steps: float = self.patch["train.max_steps"] if self.patch["train.duration"] == "steps" else 0
        warmup, schedule = self.patch["train.warmup_steps"], str(self.patch.get("train.lr_scheduler_type"))
        if not self.table.get("lr_scheduler_kwargs") or not math.isfinite(steps) or not math.isfinite(warmup):
            return
        same = registry.scheduler_arguments(schedule, int(steps), registry.warmup_steps(warmup, int(steps)))
        if self.table["lr_scheduler_kwargs"] == same:
            self.read.add("lr_scheduler_kwargs")

    def reporter(self, key: str) -> None:
        """The first experiment tracker that Footplate supports."""
        names = [name for name in words(self.get(key)) if name != "none"]
        known = [name for name in names if name in registry.REPORTERS]
        self.patch["logging.report_to"] = known[0] if known else "none"
        others = [name for name in names if name not in known[:1]]
        supported = ", ".join(name for name in registry.REPORTERS if name != "none")
        why = "one tracker at a time" if known else f"supported are {supported}"
        self.missing += [f"{key}: {name} ({why})" for name in others]

    def deepspeed(self, key: str) -> None:
        """The path of a DeepSpeed configuration: its name tells stage and offloading."""
        config = self.get(key)
        if not isinstance(config, str) or not config:
            if config:
                self.missing.append(
                    f"{key}: a configuration in the file (save it as a separate file, and import that file)"
                )
            return
        name = Path(config).name.lower()
        stage = re.search(r"(?:z(?:ero)?|stage)[_-]?([0-3])", name)
        if not stage:
            self.missing.append(f"{key}: {config} (import that file too)")
            return
        is_offloaded = bool(re.search("offload|cpu", name)) and not re.search(NOT_OFFLOADED, name)
        named = [part for part in ("optim", "param") if part in name]  # of both, a name with neither offloads both
        offload = {part: "cpu" if is_offloaded and part in (named or [part]) else "none" for part in ("optim", "param")}
        self.patch |= {"parallel.strategy": f"zero{stage[1]}", "parallel.offload_optimizer": offload["optim"]}
        self.patch |= {"parallel.offload_param": offload["param"]} if stage[1] == "3" else {}
        self.different.append(
            f"{key}: {config}: only the stage and offloading in its name are imported; import that file too"
        )

    def fsdp(self, default_version: int, ignored: Collection[str] = ()) -> None:
        """The keys fsdp, a list such as full_shard, auto_wrap, offload, and fsdp_config, a table with or without the
        prefix fsdp_. `ignored` are keys of the table without an effect on the training."""
        config, given = self.get("fsdp_config"), self.get("fsdp")
        parts = given if isinstance(given, list) else [] if given in NO_EFFECT else str(given).replace(",", " ").split()
        chosen = [word for part in parts if (word := str(part).strip().lower()) not in ("", "true", "auto_wrap")]
        if isinstance(config, str) and config:
            self.missing.append(f"fsdp_config: {config} (write its keys here in place of the file's name)")
        if not parts and not (isinstance(config, Mapping) and config):
            return
        if self.get("deepspeed"):
            message = "deepspeed and fsdp are both set, and only one of them can shard the model: remove one"
            raise SpecError([Problem("", message)])
        settings = fsdp_keys.normalize(config) if isinstance(config, Mapping) else {}
        self.different += fsdp_keys.contradictions(config) if isinstance(config, Mapping) else []
        if (version := self.get("fsdp_version")) is not None:
            settings["version"] = version
        for word in chosen:
            if word == "offload":
                settings.setdefault("offload_params", True)
            elif (name := word.upper()) in fsdp_keys.SHARDING_STRATEGIES:
                if (chosen_name := settings.setdefault("sharding_strategy", name)) != name:
                    text = f"fsdp: {word}: fsdp_config.fsdp_sharding_strategy is {chosen_name}, which is imported"
                    self.different.append(text)
            else:
                self.missing.append(f"fsdp: {word}")
        patch, different = fsdp_keys.options_of(settings, default_version)
        self.patch |= patch
        self.different += different
        rest = {key: value for key, value in settings.items() if key not in {*fsdp_keys.WITH_OPTIONS, *ignored}}
        if patch["parallel.strategy"] == "fsdp2" and rest.pop("cpu_ram_efficient_loading", None) is False:
            self.patch["parallel.extra_config"] = json.dumps({"cpu_ram_efficient_loading": False})
        self.missing += [f"fsdp_config.{key}: {value}" for key, value in rest.items() if value not in NO_EFFECT]

    def dpo_losses(self, losses: list[str], weights_key: str) -> list[str]:
        """The losses of DPO, without an SFT loss next to a single other one, which preference.sft_loss_weight adds."""
        others, weights = [name for name in losses if name != "sft"], self.table.get(weights_key) or [1.0] * len(losses)
        if not isinstance(weights, list) or len(weights) != len(losses):
            return losses
        known = {name: weight for name, weight in zip(losses, weights, strict=True) if isinstance(weight, int | float)}
        if len(losses) != 2 or len(others) != 1 or known.get(others[0]) != 1 or "sft" not in known:
            return losses
        self.read.add(weights_key)
        self.patch["preference.sft_loss_weight"] = float(known["sft"])
        return others


def is_path(name: str) -> bool:
    """Whether a name can only be a path, even if there is nothing at it on this machine; others may be IDs on the
    Hub."""
    return name.startswith(("/", ".", "~"))


def with_current_names(table: Table, former: Mapping[str, str]) -> dict[str, Any]:
    """`table` with the current names of keys that the tool has renamed: former name -> current one."""
    current = {former.get(key, key): value for key, value in table.items() if key in former}
    return {**current, **{key: value for key, value in table.items() if key not in former}}


def words(value: Any) -> list[str]:
    """The parts of a value such as "a, b", or a list of them."""
    parts = value if isinstance(value, list) else str(value or "").split(",")
    return [word for part in parts if (word := str(part).strip())]
