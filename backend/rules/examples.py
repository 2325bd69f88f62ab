"""Named machines and glances that the rules' examples stand on.

Floor 3. Imports: catalog, glance, machine, shape.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
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
    """A machine with `count` equal devices."""
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
SMALL = replace(LAPTOP, cores=2, ram_bytes=4 * GIB, ram_free_bytes=1 * GIB, name="small laptop")
H100 = gpus(1, "H100", 80, (9, 0))
TWO_H100 = gpus(2, "H100", 80, (9, 0))
T4 = gpus(1, "T4", 16, (7, 5))
NPU = gpus(1, "Ascend 910B", 64, (0, 0), "npu")
FULL_DISK = replace(LAPTOP, disk_free_bytes=GIB)
BARE = replace(LAPTOP, versions={"torch": "2.13.0"})

# With every package that an optimizer or a precision may ask for.
EXTRAS = {row.package: "9" for t in (registry.OPTIMIZERS, registry.FP8_BACKENDS) for row in t.values() if row.package}
EQUIPPED, EQUIPPED_H100, EQUIPPED_TWO = (
    replace(machine, versions={**INSTALLED, **EXTRAS}) for machine in (LAPTOP, H100, TWO_H100)
)

SMOL: ModelShape = from_config(registry.MODELS["smollm2-135m-instruct"].config)
TINY: ModelShape = from_config(registry.MODELS["tiny-llama"].config)
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

MIXTURE: ModelShape = from_config(registry.HUB["allenai/olmoe-1b-7b-0924"])

# The demo: 400 rows to learn from and 60 to validate on, about 60 to 180 tokens long.
DEMO = InputFacts(
    shape=SMOL,
    unknown="",
    has_template=True,
    format="messages",
    columns=("messages",),
    rows=400,
    held=60,
    lengths=tuple(range(60, 180, 3)),
)
# The same rows in files of one's own.
OWN = {"data.source": "files", "data.files": ("rows.jsonl",)}
FILES = replace(DEMO, held=None)
PATH = {"model.source": "path", "model.path": "model"}


def trouble(field: str, sentence: str, line: int = 0, name: str = "rows.jsonl") -> InputFacts:
    """The demo's rows in files, with something wrong."""
    where = f"{name}, line {line}" if line else name
    return replace(FILES, issues=(DataIssue(field, where, sentence, bool(line)),))
