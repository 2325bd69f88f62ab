"""Merging an adapter into its base model, and verifying that the merged model is the trained one.

The base model is loaded as it was for training: a quantized one is quantized again, then dequantized, because the
adapter fits the rounded weights and not the original ones. The merge is computed in fp32. A merged model is kept only
if, loaded from its files, it matches the base model with the adapter within a limit of the KL divergence. The adapter
must also change the outputs of the base model measurably.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from backend import registry
from backend.config import RunSpec
from backend.export import loading
from backend.export.comparison import (
    Difference,
    compare,
    log_probabilities,
    probe_batches,
    provenance,
    write_certificate,
)
from backend.models import trained
from backend.models.exports import UNCHECKED
from backend.models.spec import read_spec_outside_training
from backend.runs import CERTIFICATE, MODEL
from backend.runs.folder import Run
from backend.train import base_weights, lora, model
from backend.train.run_log import RunLog, TrainError

Tensors: TypeAlias = Sequence[torch.Tensor]  # one for each text
MAX_KL, MAX_KL_16_BIT = 1e-4, 1e-3  # for fp32 weights, and for weights rounded to 16 bits; computed in fp32
MIN_RATIO = 100.0  # minimum change by the adapter, as a multiple of the change by merging


@dataclass
class Merge:
    """One merge of the model of `run` at `step` (None: the final model) into the job's `folder`."""

    run: Run
    step: int | None
    folder: Path
    run_log: RunLog

    def run_all(self) -> dict[str, Any]:
        """Merge, check, save. Returns the result; raises TrainError and Stopped."""
        adapter = self._adapter()
        loading.require_repeatable(self.run, adapter.folder)
        spec = read_spec_outside_training(self.run)
        self._phase("loading base", f"Loading the base model, {spec.model.name}.", 0.05)
        source = loading.locate(spec, self.run_log)
        base_check = base_weights.check(self.run.path, source)
        tokenizer = model.load_saved_tokenizer(spec, adapter.folder)
        base = loading.load_base(self.run, spec, source, tokenizer)
        batches = probe_batches(self.run.path, tokenizer)
        self._phase("comparing", "Computing the outputs of the base model.", 0.25)
        of_base = log_probabilities(base, batches, "base model")
        self._phase("loading adapter", "Loading the adapter.", 0.35)
        adapted = loading.load_adapter(base, adapter.folder)
        expected = log_probabilities(adapted, batches, "base model with the adapter")
        change = compare(expected, of_base)
        self._phase("merging", "Merging.", 0.5)
        merged = merge(adapted)
        merged_fp32 = compare(expected, log_probabilities(merged, batches, "merged model"))
        _require_equal(merged_fp32, change)
        dtype = model.saved_dtype(spec, source)
        self._phase("saving", f"Saving the merged model in {_name(dtype)}.", 0.65)
        self._save(merged, tokenizer, adapter.folder, source, dtype)
        del base, adapted, merged
        gc.collect()
        self._phase("checking", "Loading the saved model again.", 0.8)
        try:
            saved = self._check_saved(spec, expected, batches, dtype)
            certificate = self._certificate(spec, adapter, base_check, dtype, change, merged_fp32, saved)
            certificate |= provenance(spec, batches)
            write_certificate(self.folder / UNCHECKED / CERTIFICATE, certificate)
            (self.folder / UNCHECKED).replace(self.folder / MODEL)
        finally:
            shutil.rmtree(self.folder / UNCHECKED, ignore_errors=True)
        return {"model": MODEL, "certificate": certificate}

    def _phase(self, name: str, text: str, fraction: float) -> None:
        loading.start_phase(self.run_log, name, text, fraction)

    def _adapter(self) -> trained.TrainedModel:
        found = trained.at_step(self.run, self.step)
        if found is None:
            raise TrainError("The run has no model that can be loaded at this step.")
        if not found.base:
            raise TrainError("The model of this run has full weights, so there is nothing to merge.")
        return found

    def _save(self, merged: Any, tokenizer: Any, adapter: Path, source: model.ModelSource, dtype: torch.dtype) -> None:
        if (adapter / trained.GENERATION).is_file():
            merged.generation_config = GenerationConfig.from_pretrained(adapter)
        size = sum(p.numel() for p in merged.parameters()) * dtype.itemsize
        loading.require_room(self.folder, "merged model needs", size * 1.05, ", then merge again")
        model.save(merged, tokenizer, self.folder / UNCHECKED, dtype)
        base_weights.copy_tokenizer_files(base_weights.folder_of(source), self.folder / UNCHECKED)

    def _check_saved(self, spec: RunSpec, expected: Tensors, batches: Tensors, dtype: torch.dtype) -> Difference:
        """How far the saved weights are from the trained model, computed in fp32. Raises TrainError."""
        kind = AutoModelForSequenceClassification if _is_reward(spec) else AutoModelForCausalLM
        options = {"local_files_only": True, "trust_remote_code": spec.model.trust_remote_code}
        saved, loaded = kind.from_pretrained(
            self.folder / UNCHECKED, dtype=torch.float32, output_loading_info=True, **options
        )
        lost = sorted([*loaded["missing_keys"], *loaded["unexpected_keys"]])
        if lost:
            raise TrainError(
                f"The saved model was not loaded completely: {', '.join(lost[:3])}. It was deleted; report this as a "
                "bug."
            )
        difference = compare(expected, log_probabilities(saved, batches, "saved model"))
        limit = MAX_KL if dtype == torch.float32 else MAX_KL_16_BIT
        if difference.kl_mean > limit:
            raise TrainError(
                f"The saved model differs from the trained one by {difference.kl_mean:.2g} (KL divergence in nats per "
                f"token; scores for reward models); at most {limit:g} is accepted. It was deleted; report this as a "
                "bug."
            )
        return difference

    def _certificate(
        self, spec: RunSpec, adapter: trained.TrainedModel, base_check: str, dtype: torch.dtype, change: Difference,
        merged: Difference, saved: Difference,
    ) -> dict[str, Any]:  # fmt: skip
        """The certificate: what was compared, and the result."""
        limits = []
        if saved.kl_mean * MIN_RATIO > change.kl_mean and not _is_reward(spec):
            limits.append(
                f"Rounding the weights to {_name(dtype)} changes the outputs by a KL divergence of {saved.kl_mean:.2g} "
                f"nats per token, more than 1% of what training changed ({change.kl_mean:.2g}). If that matters, use "
                "base model and adapter."
            )
        return {
            "status": "verified with limitations" if limits else "verified",
            "limits": limits,
            "run": self.run.id,
            "step": adapter.step,
            "base_model": spec.model.name,
            "base_weights": base_check,
            "quantization": spec.method.quantization,
            "is_reward_model": _is_reward(spec),
            "dtype": _name(dtype),
            "adapter_to_base": change.as_json(),
            "adapter_to_merged_fp32": merged.as_json(),
            "adapter_to_saved": saved.as_json(),
        }


def merge(adapted: Any) -> Any:
    """The base model with the adapter in its weights. Weights that several layers share are untied first if an adapter
    changes one of them: otherwise the change would affect the others too. Raises TrainError."""
    lora.check_shared_weights("Merging", adapted)
    _untie(adapted)
    return adapted.merge_and_unload(safe_merge=True)


def _untie(adapted: Any) -> None:
    users: dict[int, list[nn.Module]] = {}
    for module in adapted.modules():
        weight = getattr(module, "_parameters", {}).get("weight")
        if weight is not None:
            users.setdefault(id(weight), []).append(module)
    targets = {id(m.base_layer): m for m in adapted.modules() if isinstance(m, LoraLayer) and hasattr(m, "base_layer")}
    for modules in users.values():
        if len(modules) < 2 or not any(id(module) in targets for module in modules):
            continue
        for module in modules[1:]:
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
        config = adapted.get_base_model().config
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False


def _require_equal(merged: Difference, change: Difference) -> None:
    """Raise TrainError unless the merged model equals the base model with the adapter, and the adapter has an
    effect."""
    if change.kl_mean == 0 or change.kl_mean < merged.kl_mean * MIN_RATIO:
        raise TrainError(
            "The effect of the adapter is too small to verify the merge: it changes the outputs by "
            f"{change.kl_mean:.2g}, and rounding by {merged.kl_mean:.2g} (KL divergence in nats per token; scores for "
            "reward models). Train longer, or with a higher learning rate."
        )
    if merged.kl_mean > MAX_KL:
        raise TrainError(
            f"The merged model differs from the base model with the adapter by {merged.kl_mean:.2g} (KL divergence in "
            f"nats per token; scores for reward models); at most {MAX_KL:g} is accepted. It was not saved; report this "
            "as a bug."
        )


def _is_reward(spec: RunSpec) -> bool:
    return registry.STAGES[spec.train.stage].is_reward_model


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
