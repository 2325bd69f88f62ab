"""Writing the trained model as a quantized checkpoint, with a certificate that says whether it is still the same model.

bitsandbytes or torchao quantizes the full weights of a run, of a checkpoint or of a merge on the CPU, and transformers
saves them. A new process loads the files as a user would, and its predictions are compared with the trained model in
fp32: for an adapter, with base model and adapter, not with the merged model.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from backend.config import RunSpec
from backend.environments.server_process import describe_end
from backend.export import loading
from backend.export.comparison import (
    TEXTS,
    compare,
    divergences,
    log_probabilities,
    probe_batches,
    provenance,
    write_certificate,
)
from backend.export.exporter import Export
from backend.export.gguf_certificate import APART, are_smaller, stop_tokens
from backend.models import trained
from backend.models.exports import BATCHES, OUTPUTS, TEMPORARY, TOKENS, UNCHECKED
from backend.models.quantized import FORMATS
from backend.models.spec import read_spec_outside_training
from backend.runs import CERTIFICATE, MODEL, RESULT, deletion, files, jobs
from backend.train import base_weights, model
from backend.train.run_log import TrainError

LITTLE = 0.75  # of the size in 16 bits: worth a sentence
MIN_SAME = 0.75  # positions with the same most likely token
FEW_BITS = "Four bits change the outputs of a small model more than those of a large one."


def config_of(format: str) -> Any:
    """The quantization_config of `from_pretrained`."""
    if format == "bnb-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if format == "bnb-nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    torchao: Any = importlib.import_module("torchao.quantization")  # the import takes seconds
    return TorchAoConfig(
        torchao.Int8WeightOnlyConfig() if format == "torchao-int8" else torchao.Float8WeightOnlyConfig()
    )


@dataclass
class Trained:
    """What the trained model does. `base`: the log-probabilities of the base model, None for full weights."""

    tokenizer: Any
    generation_config: Any
    stops: list[int]
    batches: list[torch.Tensor]
    expected: list[torch.Tensor]
    base: list[torch.Tensor] | None
    base_check: str


class QuantizedExport(Export):
    """One export as a quantized checkpoint."""

    def run_all(self) -> dict[str, Any]:
        """Quantize, save, load again, compare, keep. Returns the result; raises TrainError and Stopped."""
        request = jobs.required_request(self.folder, jobs.QUANTIZE)
        format = str(request["format"])
        found = self._model(request["step"])
        if found.base:
            loading.require_repeatable(self.run, found.folder)
        spec, source = read_spec_outside_training(self.run), self._weights(found, str(request["merge"]))
        loading.require_room(self.folder, "quantized checkpoint needs up to", 2 * loading.elements(source))
        target = self.folder / UNCHECKED
        target.mkdir(exist_ok=True)
        try:
            observed = self._observe(spec, found)
            self._quantize(spec, source, observed, format)
            loaded = self._load_again(spec, observed)
            certificate = certify(observed, *loaded, format)
            certificate["limits"] = describe_size(2 * loading.elements(source), target)
            if certificate["limits"] and not certificate["differences"]:
                certificate["status"] = "verified with limitations"
            about = {"run": self.run.id, "step": found.step, "merge": request["merge"]}
            about |= provenance(spec, observed.batches, FORMATS[format].package)
            certificate = {**about, "base_weights": observed.base_check, **certificate}
            if certificate["differences"]:
                files.write_json(self.folder / RESULT, {"model": "", "certificate": certificate})
                why = certificate["differences"][0]
                raise TrainError(f"The quantized checkpoint differs from the trained model and was deleted. {why}")
            write_certificate(target / CERTIFICATE, certificate)
            target.replace(self.folder / MODEL)
        finally:
            deletion.delete_names(self.folder, TEMPORARY)
        return {"model": MODEL, "certificate": certificate}

    def _observe(self, spec: RunSpec, found: trained.TrainedModel) -> Trained:
        """What the trained model does."""
        self._phase("loading", "Loading the trained model.", 0.05)
        tokenizer = model.load_saved_tokenizer(spec, found.folder)
        whole, batches, of_base, base_check = self._trained_model(
            spec, found, tokenizer, lambda _: probe_batches(self.run.path, tokenizer)
        )
        self._phase("computing", "Computing the outputs of the trained model.", 0.2)
        expected, stops = log_probabilities(whole, batches, "trained model"), stop_tokens(whole, tokenizer)
        return Trained(tokenizer, whole.generation_config, stops, batches, expected, of_base, base_check)

    def _quantize(self, spec: RunSpec, source: Path, observed: Trained, format: str) -> None:
        """Write the checkpoint. Raises TrainError, Stopped."""
        gc.collect()
        self._phase("quantizing", f"Quantizing to {FORMATS[format].label}.", 0.4)
        options = {"local_files_only": True, "trust_remote_code": spec.model.trust_remote_code}
        try:
            quantized: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=config_of(format), **options
            )
            if observed.generation_config:
                quantized.generation_config = observed.generation_config
            self._phase("saving", "Saving the quantized checkpoint.", 0.6)
            quantized.save_pretrained(self.folder / UNCHECKED)
        except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TrainError(f"{FORMATS[format].package} cannot quantize this model: {reason}") from error
        observed.tokenizer.save_pretrained(self.folder / UNCHECKED)
        base_weights.copy_tokenizer_files(source, self.folder / UNCHECKED)

    def _load_again(self, spec: RunSpec, observed: Trained) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """What a new process computes with the checkpoint, and what it says about tokens. Raises TrainError."""
        self._phase("checking", "Loading the checkpoint in a new process.", 0.7)
        save_file({str(n): batch for n, batch in enumerate(observed.batches)}, self.folder / BATCHES)
        trust = ["--trust-remote-code"] if spec.model.trust_remote_code else []
        command = [sys.executable, "-m", "backend.export.load_checkpoint", str(self.folder.resolve()), *trust]
        code, lines = self._run_program(command, lambda _: None)
        if code:
            self.run_log.info("".join(lines[-30:]))
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote no message")
            last = f"the new process {describe_end(code)}." if code < 0 else last
            raise TrainError(f"transformers cannot load the quantized checkpoint, so it was deleted: {last}")
        outputs = load_file(self.folder / OUTPUTS)
        said = json.loads((self.folder / TOKENS).read_text(encoding="utf-8"))
        return [outputs[str(n)] for n in range(len(outputs))], said


def describe_tokens(tokenizer: Any, quantized: Any) -> dict[str, Any]:
    """What has to be the same in both processes: token ids of texts, chat template, stop tokens."""
    return {
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "template": tokenizer.chat_template,
        "stops": stop_tokens(quantized, tokenizer),
    }


def certify(observed: Trained, found: list[torch.Tensor], said: dict[str, Any], format: str) -> dict[str, Any]:
    """Compare, and return the certificate."""
    kind, tokenizer, differences = FORMATS[format], observed.tokenizer, []
    difference = compare(observed.expected, found)
    change = compare(observed.expected, observed.base) if observed.base else None
    if [tokenizer(text)["input_ids"] for text in TEXTS] != said["ids"] or tokenizer.chat_template != said["template"]:
        differences.append(
            "The tokenizer of the checkpoint gives different token IDs, or has a different chat template. Report this "
            "as a bug."
        )
    if said["stops"] != observed.stops:
        lost = tokenizer.convert_ids_to_tokens(sorted({*observed.stops} ^ {*said["stops"]}))
        differences.append(f"Stop tokens that only one of them has: {', '.join(lost)}. Report this as a bug.")
    small = f" {FEW_BITS}" if format == "bnb-nf4" else ""
    remedy = f"{small} Export as {FORMATS[kind.larger].label} ({kind.larger})." if kind.larger else ""
    if difference.kl_mean > kind.max_kl:
        differences.append(
            f"The mean KL divergence is {difference.kl_mean:.2g} nats per token, and at most {kind.max_kl:g} is "
            f"accepted.{remedy}"
        )
    if change and difference.kl_mean * APART > change.kl_mean and not is_nearer(observed, found):
        differences.append(
            "The comparison cannot rule out that the adapter is missing: the mean KL divergence from the trained model "
            f"is {difference.kl_mean:.2g} nats per token, more than a quarter of that between trained model and base "
            f"model ({change.kl_mean:.2g}), and not clearly below the checkpoint's divergence from the base model."
            f"{remedy}"
        )
    if difference.same_argmax < MIN_SAME:
        differences.append(
            f"The most likely next token is the same at only {difference.same_argmax:.0%} of {difference.positions} "
            f"positions; at least {MIN_SAME:.0%} are required.{remedy}"
        )
    return {
        "status": "differs" if differences else "verified",
        "differences": differences,
        "format": format,
        "max_kl_mean": kind.max_kl,
        "stop_tokens": tokenizer.convert_ids_to_tokens(observed.stops),
        "trained_to_checkpoint": difference.as_json(),
        "trained_to_base": change.as_json() if change else None,
    }


def describe_size(full: int, folder: Path) -> list[str]:
    """The limitation of a checkpoint that saves little; `full`: bytes of all weights in 16 bits."""
    share = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / max(1, full)
    if share < LITTLE:
        return []
    return [
        f"The checkpoint is {share:.0%} as large as the model in 16 bits: only linear layers are quantized. "
        "Embeddings, the LM head and stacked experts are not."
    ]


def is_nearer(observed: Trained, found: list[torch.Tensor]) -> bool:
    """Whether the checkpoint is nearer to the trained model than to the base model, beyond chance."""
    assert observed.base
    ours, theirs = (divergences(side, found).tolist() for side in (observed.expected, observed.base))
    return are_smaller(ours, theirs)
