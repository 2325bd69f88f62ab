"""The models of a run, loaded to generate: the base model once, with the adapter of the run on it."""

from __future__ import annotations

import contextlib
import gc
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from backend import registry
from backend.config import RunSpec
from backend.models import chat, trained
from backend.models.chat_files import BASE
from backend.models.spec import read_spec_outside_training
from backend.models.trained import TrainedModel
from backend.runs.folder import Run, RunError
from backend.train import adapters, added_tokens, base_weights, device, lora, model
from backend.train.continued_adapter import load_weights
from backend.train.patches import peft_dequantize, transformers_dbrx_experts
from backend.train.run_log import TrainError

TRAINED_PARTS = ("lora_", "modules_to_save", "trainable_tokens")  # parts of the names of an adapter's parameters


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be used: `use` is a context in which it is the requested side."""

    model: Any
    tokenizer: Any
    generation: Any  # its GenerationConfig, None for a reward model
    stops_at_eos: bool  # outputs also end at the tokenizer's EOS token, as in training
    dtype: torch.dtype
    use: Callable[[], contextlib.AbstractContextManager[Any]]

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        """The model, with the adapter if it belongs to this side, in the compute dtype of training."""
        low = self.dtype != torch.float32
        cast = torch.autocast(self.model.device.type, dtype=self.dtype) if low else contextlib.nullcontext()
        with self.use(), torch.no_grad(), cast:  # not inference_mode, which fp8 layers do not support
            yield self.model


class Models:
    """Loads the requested model and keeps it: one trained model at a time. A second copy of the base model is loaded
    only if `disable_adapter()` does not restore the base model; with `one_at_a_time`, the trained model is then freed
    first."""

    def __init__(self, run: Run, report: Callable[[str], None], one_at_a_time: bool = False) -> None:
        self.run, self.report, self.one_at_a_time = run, report, one_at_a_time
        self.spec = _spec(run)
        resolved = run.resolved()
        self.dtype = device.DTYPES.get(str(resolved.get("compute_dtype")), torch.float32)
        family = str(resolved.get("device") or "cpu")
        self.device = family if family != "cpu" and device.device_count(family) else "cpu"
        self.tuned: Any = None
        self.tuned_folder: Path | None = None
        self.adapter: dict[str, Any] = {}  # the configuration of the adapter that `tuned` has
        self.base: Any = None
        self.tokenizers: dict[Path, Any] = {}

    def load(self, step: int | None, side: str) -> Loaded:
        """The model of a checkpoint, None for the final one, or its base model. Raises TrainError."""
        found = self._at(step)
        tokenizer = self._tokenizer(found.folder)
        if side == BASE:
            return self._load_base(found, tokenizer)
        self._load_tuned(found, tokenizer)
        return Loaded(
            self.tuned, tokenizer, _generation(found.folder, self.tuned), True, self.dtype, contextlib.nullcontext
        )

    def tokenizer(self, step: int | None) -> Any:
        """The tokenizer that was saved with a model. Raises TrainError."""
        return self._tokenizer(self._at(step).folder)

    def _at(self, step: int | None) -> TrainedModel:
        if found := trained.at_step(self.run, step):
            return found
        what = "The final model" if step is None else f"The checkpoint of step {step}"
        raise TrainError(f"{what} of this run was deleted, or cannot be loaded because it is sharded.")

    def mode(self, step: int | None) -> str:
        """How the models are used."""
        found = trained.at_step(self.run, step)
        return chat.mode_of(self.spec, found.folder) if found else chat.TEXT

    def _tokenizer(self, folder: Path) -> Any:
        """The tokenizer that was saved with the model: it has the template of training."""
        if folder not in self.tokenizers:
            self.tokenizers[folder] = model.load_saved_tokenizer(self.spec, folder)
        return self.tokenizers[folder]

    def _load_base(self, found: TrainedModel, tokenizer: Any) -> Loaded:
        if self._is_reward:
            raise TrainError("A reward model has no base model to compare with: its base has no trained head.")
        is_plain = bool(found.base) and not trained.is_residual(_adapter_config(found.folder))
        if is_plain:
            self._load_tuned(found, tokenizer)
            base, use = self.tuned, self.tuned.disable_adapter
        else:
            if self.base is None:
                if self.one_at_a_time:
                    self._release()
                self.report("Loading the base model.")
                self.base = self._from_source(tokenizer, frozen=True)
            base, use = self.base, contextlib.nullcontext
        return Loaded(base, tokenizer, base.generation_config, False, self.dtype, use)

    def _load_tuned(self, found: TrainedModel, tokenizer: Any) -> None:
        if self.tuned_folder == found.folder:
            return
        adapter = _adapter_config(found.folder) if found.base else {}
        if not adapter or adapter != self.adapter:
            self._release()
            self.report("Loading the base model." if adapter else f"Loading {_name(found)}.")
            self.tuned = self._adapted(found.folder, adapter, tokenizer) if adapter else self._whole(found.folder)
            self.adapter = adapter
        if adapter:
            self.report(f"Loading the adapter of {_name(found)}.")
            self.tuned_folder = None  # after an error, only a part of the weights may be loaded
            load_weights(self.tuned, found.folder)
        self.tuned_folder = found.folder

    def _release(self) -> None:
        """Free the memory of the trained model."""
        self.tuned, self.adapter, self.tuned_folder = None, {}, None
        gc.collect()

    @property
    def _is_reward(self) -> bool:
        return registry.STAGES[self.spec.train.stage].is_reward_model

    def _adapted(self, folder: Path, adapter: dict[str, Any], tokenizer: Any) -> Any:
        """The base model with an adapter that does not yet have the weights in `folder`."""
        # In the compute dtype, as training freezes it; an initialization that changes it needs full precision.
        base = self._from_source(tokenizer, frozen=not trained.is_residual(adapter))
        added_tokens.fit_to_adapter(base, folder)
        if adapter.get("use_dora"):
            peft_dequantize.apply()
        if trained.is_residual(adapter):  # the initialization must change the base weights as in training
            lora.check_repeatable(adapter, trained.trained_on(self.run), self.device)
            rows = added_tokens.ids(self.spec, tokenizer)
            return adapters.apply_method(self.spec, base, self._precision, self.device, rows).eval()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `load_weights` says what is missing
                adapted = PeftModel.from_pretrained(base, str(folder))
        except Exception as error:  # of many kinds
            raise TrainError(f"The adapter in {folder} could not be loaded: {_first_line(error)}") from error
        for name, parameter in adapted.named_parameters():
            if self.spec.fp32_master_weights and any(part in name for part in TRAINED_PARTS):
                parameter.data = parameter.data.float()  # as in training; peft uses the dtype of the base model
        return adapted.eval()

    def _from_source(self, tokenizer: Any, frozen: bool = False) -> Any:
        """The model that training started with. Raises TrainError."""
        source = model.locate(self.spec, lambda text, _: self.report(text))
        base_weights.check(self.run.path, source)
        return self._placed(model.load(self.spec, source, self._precision, tokenizer, frozen=frozen))

    @property
    def _precision(self) -> str:
        return next(name for name, dtype in device.DTYPES.items() if dtype == self.dtype)

    def _whole(self, folder: Path) -> Any:
        """The model in `folder`, which has all weights. Raises TrainError."""
        kind, more = AutoModelForCausalLM, dict[str, Any]()
        if self._is_reward:
            kind, more = AutoModelForSequenceClassification, {"num_labels": 1}
        options = {"trust_remote_code": self.spec.model.trust_remote_code, "local_files_only": True}
        try:
            loaded: Any = self._placed(kind.from_pretrained(folder, dtype=self.dtype, **options, **more))
        except Exception as error:  # of many kinds
            raise TrainError(f"The model in {folder} could not be loaded: {_first_line(error)}") from error
        transformers_dbrx_experts.apply(loaded)  # it is used under autocast
        return loaded

    def _placed(self, loaded: Any) -> Any:
        if not getattr(loaded, "is_quantized", False):  # quantized weights are on their device already
            loaded.to(self.device)
        return loaded.eval()


def _spec(run: Run) -> RunSpec:
    """The options of the run, for one process. Raises TrainError."""
    try:
        return read_spec_outside_training(run)
    except RunError as error:
        raise TrainError(str(error)) from error


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / trained.ADAPTER).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _generation(folder: Path, loaded: Any) -> Any:
    """The generation config of a trained model; peft loads that of the base model."""
    if (folder / trained.GENERATION).is_file():
        return GenerationConfig.from_pretrained(folder)
    return getattr(loaded, "generation_config", None)


def _name(found: TrainedModel) -> str:
    return "the final model" if found.step is None else f"checkpoint {found.step}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
