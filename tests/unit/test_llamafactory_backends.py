"""LLaMA-Factory with Megatron-Core, KTransformers and accelerate: what is written, estimated and refused."""

import json
from dataclasses import replace
from datetime import datetime

import pytest
import yaml

from backend import rules
from backend.config import RunSpec
from backend.config.options import edit
from backend.importers import import_file
from backend.inspect import other_trainer
from backend.inspect.facts import InputFacts
from backend.launch.clusters.answers import gpus
from backend.launch.llamafactory import export
from backend.launch.plan import plan
from backend.machine import GIB, Machine
from backend.memory import estimate
from backend.modelspec import from_config
from backend.resolve import resolve
from backend.rules.examples import SMOL

EIGHT = Machine(device="cuda", gpus=gpus(8, "H100"), cores=96, ram_bytes=1000 * GIB, ram_free_bytes=1000 * GIB)
MEGATRON = {
    "launch.trainer": "llamafactory",
    "llamafactory.environment": "/opt/env",
    "llamafactory.backend": "megatron",
    "method.kind": "full",
    "parallel.strategy": "ddp",
    "launch.nproc_per_node": 8,
    "data.source": "files",
    "data.files": ("/data/a.jsonl",),
    "model.source": "hub",
    "model.hub_id": "Qwen/Qwen3-30B-A3B",
}
KTRANSFORMERS = {
    **MEGATRON,
    "llamafactory.backend": "ktransformers",
    "method.kind": "lora",
    "parallel.strategy": "fsdp2",
    "launch.launcher": "accelerate",
}
# Qwen3-30B-A3B
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
DEFAULTS = ("tensor_model_parallel_size",)  # 1 is not written
SIZES = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
    "virtual_pipeline_size",
)  # fmt: skip


@pytest.fixture(scope="module")
def facts():
    return InputFacts(shape=from_config(MOE), format="messages")


def sizes(*values):
    return {f"llamafactory.{name}": value for name, value in zip(SIZES, values, strict=False)}


def codes(changes, facts, machine=EIGHT):
    spec = edit(RunSpec(), changes)
    found = rules.check(spec, machine, facts)
    return {finding.code: finding.message for finding in found if finding.code.startswith("LLF")}


def test_megatron_is_switched_on_and_gets_the_sizes(facts):
    spec = edit(RunSpec(), {**MEGATRON, **sizes(2, 2, 1, 2), "llamafactory.sequence_parallel": True})
    made = plan(spec, EIGHT, facts)
    table = yaml.safe_load(made.files["train.yaml"])
    assert made.env["USE_MCA"] == "1" and "USE_KT" not in made.env
    assert table["tensor_model_parallel_size"] == table["pipeline_model_parallel_size"] == 2
    assert table["expert_model_parallel_size"] == 2 and table["sequence_parallel"] is True
    assert table["moe_token_dispatcher_type"] == "alltoall" and "context_parallel_size" not in table
    run = resolve(spec, EIGHT)
    assert (run.data_parallel_size, run.parameter_shards) == (2, 4)
    assert run.global_batch_size == spec.train.per_device_train_batch_size * 2
    exported = export(spec, run, "messages")
    assert exported.command.startswith("USE_MCA=1 FORCE_TORCHRUN=1")


def test_the_estimate_follows_the_sizes(facts):
    def rows(*values, shape=facts.shape):
        spec = edit(RunSpec(), {**MEGATRON, **sizes(*values)})
        found = estimate(spec, resolve(spec, EIGHT), EIGHT, replace(facts, shape=shape))
        assert found.lower_bound
        return {row.name: row.bytes for row in found.rows}

    whole, split = rows(1, 1), rows(2, 2)
    assert whole["Parameters"] == pytest.approx(30.5e9 * 2, rel=0.01)
    assert split["Parameters"] == whole["Parameters"] // 4 == split["Gradients"]
    # The distributed optimizer's state is divided by all GPUs, however the model is split.
    assert split["Optimizer state"] == pytest.approx(30.5e9 * 12 / 8, rel=0.01)
    assert whole["Optimizer state"] == pytest.approx(split["Optimizer state"], rel=0.01)
    assert rows(1, 1, 1, 8)["Optimizer state"] == pytest.approx(split["Optimizer state"], rel=0.01)
    assert rows(1, 1, 1, 8)["Parameters"] < whole["Parameters"] / 5, "most parameters are experts"
    first = replace(facts.shape, experts=0)  # as if the most frequent kind of layer had none
    assert rows(1, 1, 1, 8, shape=first) == rows(1, 1, 1, 8)


def test_ktransformers_keeps_the_experts_in_ram(facts):
    spec = edit(RunSpec(), KTRANSFORMERS)
    found = estimate(spec, resolve(spec, EIGHT), EIGHT, facts)
    experts = next(row for row in found.rows if row.name == "Experts")
    assert experts.where == "host" and experts.bytes == pytest.approx(29e9 * 2, rel=0.02)
    assert sum(row.bytes for row in found.rows if row.where == "device") < 3 * GIB
    smaller = edit(spec, {"llamafactory.kt_backend": "AMXINT4"})
    rows = estimate(smaller, resolve(smaller, EIGHT), EIGHT, facts).rows
    assert next(row for row in rows if row.name == "Experts").bytes == experts.bytes // 4


def test_ktransformers_is_launched_with_accelerate(facts):
    made = plan(edit(RunSpec(), {**KTRANSFORMERS, "llamafactory.kt_weight_path": "/w"}), EIGHT, facts)
    config = yaml.safe_load(made.files["accelerate.yaml"])
    assert config["kt_config"] == {
        "enabled": True, "kt_backend": "AMXBF16", "kt_num_threads": 32, "kt_share_backward_bb": True, "lora_rank": 16,
    }  # fmt: skip
    assert config["distributed_type"] == "FSDP" and config["fsdp_config"]["fsdp_version"] == 2
    assert made.env["USE_KT"] == "1"
    table = yaml.safe_load(made.files["train.yaml"])
    assert table["use_kt"] is True and table["kt_weight_path"] == "/w"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (sizes(3), "3 x 1 x 1 = 3 does not divide 8 GPUs."),
        (sizes(8, 2), "8 x 2 x 1 = 16 does not divide 8 GPUs."),
        (sizes(1, 1, 1, 16), "16 expert parallel GPUs do not divide 8 replicas."),
        (sizes(2, 1, 1, 2), "sequence parallelism must be on"),
        (sizes(1, 2, 1, 1, 5), "10 pipeline parts do not divide 48 layers."),
        (sizes(1, 1, 1, 1, 2), "A virtual pipeline needs a pipeline parallel size above 1."),
        ({"llamafactory.sequence_parallel": True}, "Sequence parallelism needs a tensor parallel size above 1."),
    ],
)
def test_sizes_that_do_not_divide(facts, changes, text):
    assert text in codes({**MEGATRON, **changes}, facts)["LLF007"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method.kind": "lora"}, "ignores the method lora"),
        ({"train.stage": "reward"}, "no stage reward"),
        ({"parallel.strategy": "zero3"}, "must be DDP"),
        ({"launch.device": "cpu"}, "needs NVIDIA GPUs"),
    ],
)
def test_what_megatron_does_not_train(facts, changes, text):
    assert text in codes({**MEGATRON, **changes}, facts)["LLF006"]


def test_models_that_the_backends_do_not_have(facts):
    dense = {**MOE, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "num_experts": 0}
    other = replace(facts, shape=replace(facts.shape, model_type="phi3", experts=0, layer=SMOL.layer))
    assert dense and "no model of the type phi3" in codes(MEGATRON, other)["LLF006"]
    assert "The model has no experts." in codes(KTRANSFORMERS, other)["LLF008"]
    assert not {"LLF006", "LLF007"} & codes({**MEGATRON, **sizes(2, 2)}, facts).keys()
    assert "LLF008" not in codes(KTRANSFORMERS, facts)
    shape = replace(facts.shape, layer=other.shape.layer, experts=0, layer_kinds=(other.shape.layer, facts.shape.layer))
    some = replace(facts, shape=replace(shape, layer_kind_indices=(0,) * 47 + (1,)))  # one layer has experts
    assert "LLF008" not in codes(KTRANSFORMERS, some)


def test_fsdp_needs_accelerate_and_gpus(facts):
    changes = {**KTRANSFORMERS, "llamafactory.backend": "transformers"}
    assert "LLF003" not in codes(changes, facts)
    assert "LLF003" in codes({**changes, "launch.launcher": "torchrun"}, facts)
    assert "LLF003" in codes({**changes, "launch.device": "cpu"}, facts), "accelerate 1.11 would use DDP"
    spec = edit(RunSpec(), changes)
    made = export(spec, resolve(spec, EIGHT), "messages")
    assert "accelerate.yaml" in made.files
    assert made.command == "accelerate launch --config_file accelerate.yaml -m llamafactory.launcher train.yaml"


def test_import_of_configurations_for_the_backends(tmp_path):
    table = {
        "model_name_or_path": "Qwen/Qwen3-30B-A3B", "stage": "sft", "finetuning_type": "full", "bf16": True,
        "template": "qwen3_nothink", "dataset": "none", "tensor_model_parallel_size": 1, "sequence_parallel": False,
        "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2, "recompute_granularity": "full",
        "use_distributed_optimizer": True, "moe_token_dispatcher_type": "alltoall", "apply_rope_fusion": True,
    }  # fmt: skip
    found = import_file(yaml.safe_dump(table), datetime.now(), tmp_path)
    spec = found.spec
    assert spec.launch.trainer == "llamafactory" and spec.llamafactory.backend == "megatron"
    assert (spec.llamafactory.pipeline_parallel_size, spec.llamafactory.expert_parallel_size) == (4, 2)
    assert not any(line.startswith("template:") for line in found.different)
    assert json.loads(spec.llamafactory.extra_args) == {"apply_rope_fusion": True}
    assert spec.train.activation_checkpointing and spec.llamafactory.template == "qwen3_nothink"
    again = yaml.safe_load(plan(spec, EIGHT).files["train.yaml"])
    assert all(again[key] == value for key, value in table.items() if key not in ("dataset", *DEFAULTS)), again
    kt = {**{key: table[key] for key in ("model_name_or_path", "stage", "template")}, "finetuning_type": "lora"}
    spec = import_file(yaml.safe_dump({**kt, "use_kt": True, "kt_weight_path": "/w"}), datetime.now(), tmp_path).spec
    assert spec.llamafactory.backend == "ktransformers" and spec.launch.launcher == "accelerate"
    assert yaml.safe_load(plan(spec, EIGHT).files["train.yaml"])["kt_weight_path"] == "/w"
    plain = import_file(yaml.safe_dump(kt), datetime.now(), tmp_path).spec
    assert plain.launch.trainer == "footplate" and plain.llamafactory.backend == "transformers"


def test_packages_of_the_backends_are_looked_for(tmp_path, monkeypatch):
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / "llamafactory-0.9.5.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()

    def problem(changes):
        spec = edit(RunSpec(), {**changes, "llamafactory.environment": str(tmp_path)})
        return other_trainer.inspect_trainer(spec, tmp_path)["trainer_problem"]

    (packages / "mcore_adapter").mkdir()  # as PyPI's package of the same name has
    assert "no mcore_adapter" in problem(MEGATRON) and "subdirectory=mcore_adapter" in problem(MEGATRON)
    (packages / "mcore_adapter/trainer").mkdir()
    (packages / "mcore_adapter/trainer/dpo_config.py").touch()
    assert problem(MEGATRON) == ""
    assert "lacks kt-kernel, transformers-kt, accelerate-kt" in problem(KTRANSFORMERS)
    for name in other_trainer.KT_PACKAGES:
        (packages / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.setattr(other_trainer, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu sse2 avx2\n")
    assert "requires a CPU with AMX or AVX-512" in problem(KTRANSFORMERS)
    assert problem({**KTRANSFORMERS, "launch.place": "slurm"}) == "", "the nodes have other CPUs"
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512f avx2\n")
    assert problem(KTRANSFORMERS) == ""
