"""The files of a spec for LLaMA-Factory, as they are collected."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from backend import registry
from backend.config import RunSpec
from backend.config.options import get, options, shown
from backend.launch import accelerate_config
from backend.modelspec import ModelShape
from backend.resolve import ResolvedRun
from backend.runs import ACCELERATE, DATASET_INFO, DEEPSPEED, FSDP, LLAMAFACTORY

OPTIONS = {option.name: option for option in options()}
MODULE = "llamafactory.launcher"  # what llamafactory-cli starts in each process


@dataclass
class Export:
    """The files by name, and what they leave out. `different`: same option, different behavior; `missing`: no
    counterpart. Both are sentences that begin with the option."""

    spec: RunSpec
    run: ResolvedRun
    format: str  # of the first dataset
    converts: bool = True  # whether to convert data files that LLaMA-Factory cannot read as they are
    shape: ModelShape | None = None  # of the model, if it is known
    devices: Sequence[str] = ()  # what selects those of the run, if the machine is known
    table: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)  # the converted data files: name -> text
    different: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # combinations that LLaMA-Factory's own parser rejects
    written: set[str] = field(default_factory=set)  # options that the files contain already

    @property
    def deepspeed(self) -> str:
        """The DeepSpeed configuration; '' without DeepSpeed."""
        return self.run.engine.config_text(self.spec) if self.run.engine.config_file == DEEPSPEED else ""

    @property
    def files(self) -> dict[str, str]:
        """Name -> text."""
        found = {LLAMAFACTORY: yaml.safe_dump(self.table, sort_keys=False, allow_unicode=True)}
        found[DATASET_INFO] = json.dumps(self.datasets, indent=2) + "\n"
        found |= {ACCELERATE: accelerate_config.text(self.spec, self.run)} if self.is_accelerated else {}
        return {**found, **self.converted, **({DEEPSPEED: self.deepspeed} if self.deepspeed else {})}

    @property
    def is_accelerated(self) -> bool:
        """Whether accelerate's configuration has the strategy, which LLaMA-Factory's own has no key for. On CPUs,
        accelerate 1.11 ignores it: its state.py turns MULTI_CPU into no other type, and the model would use DDP."""
        is_fsdp = self.run.engine.config_file == FSDP
        return self.spec.launch.launcher == "accelerate" and is_fsdp and self.run.device != "cpu"

    @property
    def command(self) -> str:
        """What starts the training in the folder of the files."""
        run, spec = self.run, self.spec
        variables = {**run.engine.environment(run.device), **environment(spec)}
        device = registry.DEVICES[run.device].visible_devices_env
        if device and run.device_ids and (spec.launch.devices or run.world_size == 1):
            # llamafactory-cli starts a process on each device that is visible.
            variables[device] = ",".join(self.devices or map(str, run.device_ids))
        variables |= spec.launch.env
        if (run.world_size > 1 or self.deepspeed) and not self.is_accelerated:
            variables |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(run.nproc_per_node)}
        if run.nnodes > 1:
            variables |= {"NNODES": str(run.nnodes), "NODE_RANK": "0", "MASTER_PORT": str(run.master_port or 29500)}
            variables |= {"MASTER_ADDR": spec.launch.master_addr or "ADDRESS-OF-NODE-0"}
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        if self.is_accelerated:
            return " ".join([*words, "accelerate", "launch", "--config_file", ACCELERATE, "-m", MODULE, LLAMAFACTORY])
        return " ".join([*words, "llamafactory-cli", "train", LLAMAFACTORY])

    def value(self, option: str) -> Any:
        """The value of an option that is visible; None for one that has no effect."""
        self.written.add(option)
        spec = self.spec
        return get(spec, option) if shown(spec, OPTIONS[option]) else None

    def lacks(self, option: str, why: str) -> None:
        """Note an option without a counterpart."""
        self.missing.append(f"{option}: {why}")


def environment(spec: RunSpec) -> dict[str, str]:
    """The switches of LLaMA-Factory's launcher and parser that are environment variables."""
    switches = {"megatron": {"USE_MCA": "1"}, "ktransformers": {"USE_KT": "1"}}
    return switches.get(spec.other_backend, {})
