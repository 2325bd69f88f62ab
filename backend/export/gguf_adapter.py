"""Exporting an adapter as a GGUF LoRA file, along with a GGUF file of its base model.

The file of the base model has the weights that the adapter was trained on (rounded, if the run quantized them), and the
tokenizer, chat template and stop tokens of the trained model. So both files together are the trained model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from backend.export import llama_cpp, loading, modelfile
from backend.export.gguf import CONVERTED, LOG_FILE, GgufExport
from backend.export.tensor_types import QuantizedWeight
from backend.models import trained
from backend.models.exports import DEQUANTIZED, PLAIN
from backend.models.gguf import ADAPTER_FILE, BASE_FILE, FORMATS, MODELFILE
from backend.models.gguf_adapter import WEIGHTS
from backend.models.spec import read_spec_outside_training
from backend.runs import jobs
from backend.train import base_weights, model, quantized
from backend.train.adapter_names import PREFIX
from backend.train.device import DTYPES

CONVERTING_ADAPTER = 0.25  # completed fraction
IS_B = ".lora_B."
OF_TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template", "generation_")


class GgufAdapterExport(GgufExport):
    """One export of an adapter."""

    def _weights(self, found: trained.TrainedModel, merge: str) -> Path:
        """The folder of the base model; for a quantized base model, the folder of a dequantized copy."""
        spec = read_spec_outside_training(self.run)
        source = loading.locate(spec, self.run_log)
        folder = base_weights.folder_of(source)
        stored = quantized.stored_config(source.name, source.options)
        if folder and loading.elements(folder) and not stored and spec.method.quantization == "none":
            return folder
        self._phase("loading", "Loading the base model.", 0.02)
        base = loading.load_base(self.run, spec, source, model.load_saved_tokenizer(spec, found.folder))
        if not stored and spec.method.quantization == "none" and (folder := base_weights.folder_of(source)):
            return folder  # the weights were downloaded
        dtype = DTYPES[str(self.run.resolved().get("compute_dtype") or "fp32")]
        loading.require_room(self.folder, "dequantized base model needs", base.num_parameters() * dtype.itemsize * 1.05)
        model.save(base, model.load_saved_tokenizer(spec, found.folder), self.folder / DEQUANTIZED, dtype)
        return self.folder / DEQUANTIZED

    def _linked(self, source: Path) -> Path:
        """The base model with the tokenizer, the chat template and the stop tokens of the trained model."""
        folder, own = super()._linked(source), self._adapter()
        for path in [*folder.iterdir(), *own.iterdir()]:
            if path.name.startswith(OF_TOKENIZER) and path.name not in base_weights.FROM_BASE:
                (folder / path.name).unlink(missing_ok=True)
                if (own / path.name).is_file():
                    self._link(own / path.name, folder)
        return folder

    def _write(self, environment: Path, source: Path, file: Path, format: str) -> list[QuantizedWeight]:
        weights = super()._write(environment, source, file, FORMATS[format].base)
        write_plain_adapter(self._adapter(), self.folder / PLAIN)
        target = self._adapter_file(file)
        command = llama_cpp.convert_adapter_command(environment, self._linked(source), self.folder / PLAIN, target)
        text, failed = "Converting the adapter.", "llama.cpp's converter cannot convert this adapter: "
        self._run(command, environment, target, text, (CONVERTING_ADAPTER, CONVERTED), failed)
        return weights

    def _adapter(self) -> Path:
        return self._model(jobs.required_request(self.folder, jobs.GGUF)["step"]).folder

    def _adapter_file(self, file: Path) -> Path:
        return file.with_name(ADAPTER_FILE.format(run=self._stem))

    def _file_name(self, format: str) -> str:
        return BASE_FILE.format(run=self._stem, format=FORMATS[format].base)

    def _server(self, environment: Path, file: Path) -> llama_cpp.Server:
        return llama_cpp.Server(file, environment, self.folder / LOG_FILE, self._adapter_file(file))

    def _write_settings(self, file: Path, tokenizer: Any, stops: Sequence[str], system: str) -> None:
        """The Modelfile. LM Studio has no adapters."""
        if text := modelfile.write(file.name, tokenizer, stops, system, self._adapter_file(file).name):
            (file.parent / MODELFILE).write_text(text, encoding="utf-8")


def write_plain_adapter(folder: Path, target: Path) -> None:
    """Copy the adapter in `folder` so that lora_alpha / rank is the trained scale of each pair of matrices, which is
    how llama.cpp scales them: rsLoRA has another scale, and patterns have different ones for different modules."""
    config, tensors = LoraConfig.from_pretrained(str(folder)), load_file(folder / WEIGHTS)
    assert isinstance(config, LoraConfig)
    alphas = {name: scale(config, name) * tensor.shape[1] for name, tensor in tensors.items() if IS_B in name}
    alpha = next(iter(alphas.values()))
    for name, own in alphas.items():
        if not math.isclose(own, alpha, rel_tol=1e-6):
            tensors[name] = tensors[name].float() * (own / alpha)
    target.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / WEIGHTS)
    values = json.loads((folder / trained.ADAPTER).read_text(encoding="utf-8"))
    (target / trained.ADAPTER).write_text(json.dumps({**values, "lora_alpha": alpha}), encoding="utf-8")


def scale(config: LoraConfig, name: str) -> float:
    """The factor by which peft multiplies the product of the matrices with this name (tuners/lora/model.py, 0.21)."""
    module = name.removeprefix(PREFIX).partition(".lora_")[0]
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, module), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, module), config.lora_alpha)
    return float(alpha / (math.sqrt(rank) if config.use_rslora else rank))
