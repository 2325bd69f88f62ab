"""Training that continues an adapter (lora.adapter_path): its weights are loaded before the first step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from peft.utils import load_peft_weights

from backend import registry
from backend.config import RunSpec
from backend.train import adapter_names, base_weights, checkpoint_weights, lora
from backend.train.context import TrainContext
from backend.train.model import ModelSource
from backend.train.run_log import TrainError

REFERENCE = re.compile(r"\.ref(?=\.|$)")  # in the names of its parameters
REMEDY = "Use the base model and the adapter options that it was trained with."


def load(context: TrainContext, source: ModelSource, model: Any) -> None:
    """Load the adapter of lora.adapter_path into `model`, which has a new one; nothing without this option. Raises
    TrainError unless it is an adapter with the options of the run, on the base model in `source`."""
    spec = context.spec
    if spec.method.kind != "lora" or not spec.lora.adapter_path:
        return
    folder = Path(spec.lora.adapter_path).expanduser()
    context.first(lambda: _check(spec, source, model, folder))
    _load_for_reference(model, folder)
    context.run_log.info(f"Continuing the adapter in {folder}.")


def restore_reference(context: TrainContext, model: Any, start: Path) -> None:
    """Load the reference adapter of DPO and KTO before the checkpoint `start` is resumed: DeepSpeed and FSDP load only
    what is trained, so the reference would be the base model. It is the adapter that the run continued, of which a
    checkpoint may have a copy. Raises TrainError if neither is there."""
    if not any(REFERENCE.search(name) for name, _ in model.named_parameters()):
        return
    path, copy = context.spec.lora.adapter_path, start / "ref"

    def find() -> str:
        own = get_peft_model_state_dict(model, adapter_name="ref").keys()
        # With ZeRO-3, peft saves the trained adapter in "ref", under other names.
        if checkpoint_weights.has_adapter(copy) and load_peft_weights(str(copy), device="cpu").keys() == own:
            return str(copy)
        if path and not checkpoint_weights.has_adapter(Path(path).expanduser()):
            label = registry.STAGES[context.spec.train.stage].label
            raise TrainError(
                f"lora.adapter_path: the reference model of {label} is the adapter in {path}, which is not there "
                "anymore. Restore this folder to resume the run."
            )
        return path

    folder: str = context.group.share(context.first(find))
    if folder == str(copy) and not _is_on_meta(model):
        checkpoint_weights.load_adapter(model, "ref", copy)
    elif folder:  # also into the trained adapter, whose weights the engine loads later
        _load_for_reference(model, Path(folder).expanduser())


def _load_for_reference(model: Any, folder: Path) -> None:
    """Load the adapter of lora.adapter_path into the trained adapter and into that of the reference model."""
    if _is_on_meta(model):  # its weights are those of rank 0
        return
    try:
        load_weights(model, folder)
        _copy_to_reference(model)
    except TrainError as error:
        raise TrainError(f"lora.adapter_path: {str(error).replace(checkpoint_weights.REMEDY, REMEDY)}") from error


def _is_on_meta(model: Any) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _check(spec: RunSpec, source: ModelSource, model: Any, folder: Path) -> None:
    if not (folder / lora.CONFIG).is_file():
        raise TrainError(
            f"lora.adapter_path: {folder} has no {lora.CONFIG}. Set the folder of a saved LoRA adapter, or leave the "
            "option empty."
        )
    lora.check_adapter(model, folder, "lora.adapter_path")
    for run in (folder.parent, folder.parent.parent):  # `folder` is a run's model, or one of its checkpoints
        base_weights.check_adapter(run, source, folder)


def load_weights(adapted: Any, folder: Path) -> None:
    """Load the weights of the adapter in `folder`: all of them. Raises TrainError."""
    names = adapter_names.saved_names(adapted, get_peft_model_state_dict(adapted))
    if all(name == saved for name, saved in names.items()):
        checkpoint_weights.load_adapter(adapted, "default", folder)
    else:  # the file has published names, which only peft knows how to load
        adapted.load_adapter(str(folder), "default")
        adapter_names.require_loaded(adapted, folder)


def _copy_to_reference(adapted: Any) -> None:
    """TRL 1.16 (trainer/dpo_trainer.py, kto_trainer.py) copies the initial adapter when it creates the trainer: it is
    the reference model of DPO and KTO. Copy the loaded weights, with which training starts, in the same way."""
    for name, parameter in adapted.named_parameters():
        if REFERENCE.search(name):
            parameter.data.copy_(adapted.get_parameter(REFERENCE.sub(".default", name)).data)
