"""Training with LLaMA-Factory instead of Footplate's own trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend.config.fields import KTRANSFORMERS, LLAMAFACTORY, MEGATRON, JsonText, Section, Ui, matches

TEMPLATE = r"[\w.-]+"
EXPERTS = {"AMXBF16": "bf16", "AMXINT8": "int8", "AMXINT4": "int4"}
BACKENDS = {"transformers": "Transformers", "megatron": "Megatron-Core", "ktransformers": "KTransformers"}


class LlamaFactory(Section):
    """LLaMA-Factory: where it is installed, and keys of its configuration that no option has."""

    environment: Annotated[str, Ui("LLaMA-Factory environment", when=LLAMAFACTORY, path="folder")] = ""
    """Folder of the Python environment in which llamafactory is installed."""
    backend: Annotated[
        Literal["transformers", "megatron", "ktransformers"], Ui("Backend", when=LLAMAFACTORY, choices=BACKENDS)
    ] = "transformers"
    """What LLaMA-Factory trains with: transformers; Megatron-Core (mcore_adapter), which splits layers and sequences
    over GPUs; or KTransformers, which keeps the experts of a large mixture-of-experts model in RAM."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Tensor parallel size", when=MEGATRON)] = 1
    """GPUs that share each weight matrix; usually at most the number of GPUs of a node."""
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Pipeline parallel size", when=MEGATRON)] = 1
    """Pipeline stages into which the layers are divided, each on its own GPUs."""
    virtual_pipeline_size: Annotated[int, Field(ge=1, le=1024), Ui("Virtual pipeline size", when=MEGATRON)] = 1
    """Parts into which each pipeline stage is divided, which take turns so that GPUs wait less; 1 turns this off."""
    context_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Context parallel size", when=MEGATRON)] = 1
    """GPUs that share the tokens of each sequence."""
    expert_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Expert parallel size", when=MEGATRON)] = 1
    """GPUs that share the experts of a mixture-of-experts model."""
    sequence_parallel: Annotated[bool, Ui("Sequence parallelism", when=MEGATRON)] = False
    """Also divides the activations between the layers among the tensor parallel GPUs."""
    kt_backend: Annotated[
        Literal["AMXBF16", "AMXINT8", "AMXINT4"], Ui("Expert weights", when=KTRANSFORMERS, choices=EXPERTS)
    ] = "AMXBF16"
    """Number format of the expert weights when the CPU computes with them."""
    kt_weight_path: Annotated[str, Ui("Converted expert weights", when=KTRANSFORMERS, path="folder")] = ""
    """Folder with expert weights that kt-kernel has converted to this format; empty uses the model's own weights."""
    kt_num_threads: Annotated[int, Field(ge=1, le=4096), Ui("CPU threads for experts", when=KTRANSFORMERS)] = 32
    """Threads that compute the experts; usually the physical CPU cores."""
    template: Annotated[
        str, matches(TEMPLATE, "must be the name of a template, such as qwen3"), Ui("Template", when=LLAMAFACTORY)
    ] = ""
    """LLaMA-Factory's template for the model, such as qwen3 or llama3; empty derives one from the tokenizer's chat
    template."""
    extra_args: Annotated[JsonText, Ui("Extra arguments (JSON)", when=LLAMAFACTORY, widget="text")] = ""
    """Keys that are merged into train.yaml and override it, for settings without an option; usually empty."""
