"""Machines and inspection results that the examples of the rules use."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.data import place
from backend.inspect import DataIssue, InputFacts
from backend.machine import GIB, Gpu, Machine
from backend.modelspec import ModelShape, from_config

INSTALLED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
}


def gpus(count: int, name: str, gib: int, capability: tuple[int, int], device: str = "cuda") -> Machine:
    """A machine with `count` identical devices."""
    found = tuple(Gpu(i, name, gib * GIB, gib * GIB, capability) for i in range(count))
    ram = 64 * count * GIB
    return Machine(
        device=device,
        gpus=found,
        ram_bytes=ram,
        ram_free_bytes=ram,
        cores=16 * count,
        disk_free_bytes=1000 * GIB,
        versions=INSTALLED,
        name=f"{count} x {name}",
    )


LAPTOP = Machine(cores=8, ram_bytes=32 * GIB, ram_free_bytes=24 * GIB, versions=INSTALLED, name="laptop")
SMALL_LAPTOP = replace(LAPTOP, cores=2, ram_bytes=4 * GIB, ram_free_bytes=1 * GIB, name="small laptop")
H100 = gpus(1, "H100", 80, (9, 0))
TWO_H100 = gpus(2, "H100", 80, (9, 0))
T4 = gpus(1, "T4", 16, (7, 5))
NPU = gpus(1, "Ascend 910B", 64, (0, 0), "npu")
FULL_DISK = replace(LAPTOP, disk_free_bytes=GIB)
TORCH_ONLY = replace(LAPTOP, versions={"torch": "2.13.0"})

# With every optional package of the optimizers and FP8 backends installed.
EXTRAS = {row.package: "9" for t in (registry.OPTIMIZERS, registry.FP8_BACKENDS) for row in t.values() if row.package}
EQUIPPED, EQUIPPED_H100, EQUIPPED_TWO = (
    replace(machine, versions={**INSTALLED, **EXTRAS}) for machine in (LAPTOP, H100, TWO_H100)
)

SMOL: ModelShape = from_config(registry.BUILTIN_MODELS["smollm2-135m-instruct"].config)
TINY: ModelShape = from_config(registry.BUILTIN_MODELS["tiny-llama"].config)
LLAMA_8B: ModelShape = from_config(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
    }
)
GPT2: ModelShape = from_config(
    {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}
)

MOE: ModelShape = from_config(registry.HUB_CONFIGS["allenai/olmoe-1b-7b-0924"])

# The demo dataset: 400 training examples and 60 eval examples of about 60 to 180 tokens.
DEMO = InputFacts(
    shape=SMOL,
    shape_unknown_reason="",
    has_chat_template=True,
    format="messages",
    columns=("messages",),
    num_examples=400,
    num_validation_examples=60,
    token_lengths=tuple(range(60, 180, 3)),
)
# The same examples in the user's files: the options, and what inspection finds.
USER_DATA = {"data.source": "files", "data.files": ("data.jsonl",)}
USER_DATA_FACTS = replace(DEMO, num_validation_examples=None)
PLAIN_TEXT = replace(USER_DATA_FACTS, format="text", columns=("text",))
LOCAL_MODEL = {"model.source": "path", "model.path": "model"}


def with_data_issue(field: str, sentence: str, line: int = 0) -> InputFacts:
    """USER_DATA_FACTS with an issue in a file, or in one example if `line` is given."""
    issue = DataIssue(field, place("data.jsonl", line), sentence, bool(line))
    return replace(USER_DATA_FACTS, data_issues=(issue,))


def full_spec(optimizer: str, **more: object) -> dict[str, object]:
    """The options of full fine-tuning with an optimizer; section__key=value for others."""
    spec = {"method.kind": "full", "train.learning_rate": 2e-5, "train.optim": optimizer}
    return {**spec, **{key.replace("__", "."): value for key, value in more.items()}}
