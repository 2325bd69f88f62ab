"""Files of other tools that do not train are refused by what they are for, and files that train are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small import client

from backend.config import RunSpec
from backend.config.options import SpecError
from backend.importers import detect_format, import_file
from backend.machine import Machine

MODEL = {"model_name_or_path": "a/b", "template": "qwen3"}
TRAINING = {**MODEL, "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "x"}


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ({**MODEL, "infer_backend": "vllm"}, "llamafactory-cli chat"),
        ({**MODEL, "adapter_name_or_path": "out", "infer_backend": "huggingface", "infer_dtype": "auto"}, "webchat"),
        ({**MODEL, "adapter_name_or_path": "out", "finetuning_type": "lora"}, "no data and no training arguments"),
        (MODEL, "no data and no training arguments"),
        ({**MODEL, "export_dir": "merged", "export_size": 5, "export_device": "cpu"}, "llamafactory-cli export"),
        ({**MODEL, "export_dir": "gptq", "export_quantization_bit": 4}, "llamafactory-cli export"),
        ({**TRAINING, "do_train": "-", "do_predict": True, "predict_with_generate": True}, "generates its predictions"),
        ({**TRAINING, "do_train": False}, "trains nothing"),
        ({**MODEL, "task": "mmlu_test", "n_shot": 5, "lang": "en"}, "llamafactory-cli eval"),
        ({"top.model_name": "Qwen3-4B", "top.finetuning_type": "lora", "train.learning_rate": "5e-5"}, "LLaMA Board"),
        ({"lang": "en", "last_model": "Qwen3-4B", "path_dict": {}, "cache_dir": None}, "LLaMA Board"),
        ({"model": "a/b", "dist_config": {"name": "fsdp2"}, "train_dataset": "x"}, "trainer v1"),
        ({"model": "a/b", "peft_config": {"name": "lora", "export_dir": "merged"}}, "trainer v1"),
        ({"base_model": "a/b", "sequence_len": 2048, "adapter": "lora", "lora_model_dir": "out"}, "merge-lora"),
        ({"base_model": "a/b", "quantization": {"weight_dtype": "int4"}, "output_dir": "out"}, "quantize"),
        ({"provider": "modal", "gpu": "h100", "gpu_count": 2, "secrets": ["HF_TOKEN"]}, "axolotl --cloud"),
        ({"model": "a/b", "tensor_parallel_size": 4, "gpu_memory_utilization": 0.9}, "trl vllm-serve"),
    ],
)
def test_files_that_do_not_train_are_refused(table: dict[str, Any], part: str) -> None:
    text = yaml.safe_dump({key: value for key, value in table.items() if value != "-"})
    assert detect_format(text)
    with pytest.raises(SpecError, match=part):
        import_file(text, RunSpec(), Path())


@pytest.mark.parametrize(
    ("table", "tool"),
    [
        (TRAINING, "llamafactory"),
        ({**TRAINING, "infer_backend": "vllm", "export_dir": "merged"}, "llamafactory"),
        ({**TRAINING, "do_predict": True, "predict_with_generate": True}, "llamafactory"),
        ({**MODEL, "dataset": "x", "cutoff_len": 512}, "llamafactory"),
        ({"base_model": "a/b", "datasets": [{"path": "c/d"}]}, "axolotl"),
        ({"base_model": "a/b", "pretraining_dataset": "c/d", "micro_batch_size": 1, "lora_model_dir": "x"}, "axolotl"),
        ({"model_name_or_path": "a/b", "dataset_name": "c/d", "do_eval": True, "do_train": False}, "trl"),
        ({"model_name_or_path": "a/b", "dataset_mixture": {"datasets": []}, "do_eval": True}, "trl"),
        ({"model_name_or_path": "a/b", "do_eval": True}, ""),
        ({"model": {"source": "hub", "hub_id": "a/b"}, "train": {"seed": 1}}, ""),
    ],
)
def test_files_that_train_are_read(table: dict[str, Any], tool: str) -> None:
    assert detect_format(yaml.safe_dump(table)) == tool


def test_the_page_shows_what_the_file_is_for(tmp_path: Path) -> None:
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as http:
        response = http.post("/api/import", json={"yaml": yaml.safe_dump({**MODEL, "infer_backend": "vllm"})})
    assert response.status_code == 422 and "llamafactory-cli chat" in response.json()["error"]
