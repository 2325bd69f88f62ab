"""The process that writes a GGUF file with k-quants (q6_k, q5_k_m, q4_k_m) from one with 16 bits per element.

The functions that quantize are llama.cpp's, in the library of xllamacpp. This library lacks `llama_model_quantize`,
which chooses the type of each tensor, so this module chooses the types, as llama.cpp's src/llama-quant.cpp does. The
module imports nothing from Footplate: its packages are those of the environment gguf, and numpy. stdout gets lines
`Writing: N%`, and as its last line the quantized weights, JSON of [name, columns, type].
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

BLOCK = 256  # elements of a block of a k-quant; the columns of a weight are split into blocks
CHUNK = 2**24  # elements that are quantized at once; bounds memory
FORMATS = {  # the file's type, the type of most tensors, whether some tensors get more bits
    "q6_k": (LlamaFileType.MOSTLY_Q6_K, Type.Q6_K, False),
    "q5_k_m": (LlamaFileType.MOSTLY_Q5_K_M, Type.Q5_K, True),
    "q4_k_m": (LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K, True),
}
FALLBACKS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}  # types with blocks of 32 elements
KEPT = re.compile(  # weights that llama.cpp does not quantize: small ones, and those that it computes with as they are
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel|per_layer_model_proj"
    r"|^position_embd\.weight|^token_types\.weight|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|w[0-2]|v[0-2]|a[0-2]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight"
)
EMBEDDINGS, OUTPUT = ("token_embd.weight", "per_layer_token_embd.weight"), "output.weight"
VALUES = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")  # errors in these weights matter more


@dataclass(frozen=True)
class Model:
    """What the choice of types depends on. `tensors`: name -> shape, columns last; `layers`: their number; `experts`:
    of a layer, 0 without; `is_70b`: a Llama or Qwen2 with 80 layers and grouped heads."""

    tensors: Mapping[str, tuple[int, ...]]
    layers: int
    experts: int = 0
    is_70b: bool = False


def choose_types(model: Model, format: str) -> dict[str, Type]:
    """The type of each tensor that is quantized, by the rules of `llama-quantize` without those for Falcon and
    GLM-5-Next."""
    weights = sorted((name for name, shape in model.tensors.items() if _is_quantized(name, shape)), key=_place)
    values = [name for name in weights if any(kind in name for kind in VALUES)]
    down = [name for name in weights if "ffn_down" in name]
    _, default, is_mixed = FORMATS[format]
    better = {OUTPUT} if OUTPUT in model.tensors else set(EMBEDDINGS)  # tied: the embeddings are the output layer, too
    if is_mixed:
        better |= {name for index, name in enumerate(values) if _gets_more_bits(index, len(values))}
        layers = {name: _place(name)[0] if model.experts > 1 else index for index, name in enumerate(down)}
        better |= {name for name, layer in layers.items() if _gets_more_bits(layer, model.layers)}
    types = {name: Type.Q6_K if name in better else default for name in weights}
    if model.is_70b:
        types |= {name: Type.Q5_K for name in values if types[name] == Type.Q4_K}
    if model.experts == 8:  # Mixtral, whose attention is a small part of the weights
        types |= {name: Type.Q8_0 for name in weights if name in values or "attn_k.weight" in name}
        types |= {name: Type.Q5_K for name in weights if "attn_output.weight" in name and types[name] == Type.Q4_K}
    return {name: _fitting(type, model.tensors[name][-1]) for name, type in types.items()}


def _is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and name.endswith("weight") and not KEPT.search(name)


def _place(name: str) -> tuple[int, str]:
    """Layer and name: the order in which llama.cpp counts tensors of a kind; tensors without a layer come first."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1, name


def _gets_more_bits(index: int, count: int) -> bool:
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _fitting(type: Type, columns: int) -> Type:
    """The type itself, or one with smaller blocks if the columns cannot be split into blocks of this type."""
    if type in FALLBACKS and columns % BLOCK:
        type = FALLBACKS[type]
    return type if columns % gguf.GGML_QUANT_SIZES[type][0] == 0 else Type.F16


def describe(reader: Any) -> Model:
    """The model in a GGUF file."""
    architecture = str(reader.fields["general.architecture"].contents())

    def number(key: str) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        value = field.contents() if field else 0
        return int(max(value) if isinstance(value, list) else value)  # a number for each layer

    layers, heads = number("block_count"), (number("attention.head_count"), number("attention.head_count_kv"))
    is_70b = layers == 80 and (architecture == "qwen2" or (architecture == "llama" and heads[0] != heads[1]))
    tensors = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    return Model(tensors, layers, number("expert_count"), is_70b)


def quantize(source: Path, target: Path, format: str) -> list[tuple[str, int, str]]:
    """Write `target`; return name, columns and type of each quantized weight. Raises ValueError for NaN or infinity."""
    reader = gguf.GGUFReader(source)
    model = describe(reader)
    types = choose_types(model, format)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type", "general.quantization")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(FORMATS[format][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        type = types.get(tensor.name, tensor.tensor_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        size = int(np.prod(gguf.quant_shape_to_byte_shape(shape, type)))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, type)
    with contextlib.closing(writer):
        _write(writer, reader.tensors, types)
    return [(name, model.tensors[name][-1], type.name) for name, type in types.items()]


def _write(writer: Any, tensors: Sequence[Any], types: Mapping[str, Type]) -> None:
    """Write the file, whose keys and tensors are known to `writer`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    ggml, done, total = _library(), 0, sum(int(tensor.n_elements) for tensor in tensors)
    for tensor in tensors:
        type = types.get(tensor.name, tensor.tensor_type)
        data = [tensor.data] if type == tensor.tensor_type else []
        for chunk in () if data else _quantized(ggml, tensor, type):
            data.append(chunk)
            _print(f"Writing: {100 * done // total}%")
        writer.write_tensor_data(data[0] if len(data) == 1 else np.concatenate(data))
        done += int(tensor.n_elements)


def _quantized(ggml: Any, tensor: Any, type: Type) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The bytes of a tensor in this type, in chunks of rows."""
    columns = int(tensor.shape[0])
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step, size = max(1, CHUNK // columns), gguf.quant_shape_to_byte_shape((1, columns), type)[-1]
    for start in range(0, len(rows), step):
        values = np.ascontiguousarray(gguf.dequantize(rows[start : start + step], tensor.tensor_type), np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"The weight {tensor.name} has NaN or infinite values in 16 bits. Export as bf16 instead.")
        found = np.empty(len(values) * size, np.uint8)
        written = ggml.ggml_quantize_chunk(
            int(type), values.ctypes.data, found.ctypes.data, 0, len(values), columns, None
        )
        assert written == found.nbytes, f"ggml wrote {written} bytes of {tensor.name}, not {found.nbytes}."
        yield found


def _library() -> Any:
    """ggml, in the library of xllamacpp. Raises ValueError if it does not export the function."""
    native = importlib.import_module("xllamacpp.xllamacpp")
    ggml = ctypes.CDLL(str(native.__file__))
    if not hasattr(ggml, "ggml_quantize_chunk"):
        raise ValueError("This build of xllamacpp has no functions for k-quants. Export as q8_0, f16 or bf16 instead.")
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    return ggml


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Quantize, or say in the last line of stderr why that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("format", choices=tuple(FORMATS))
    arguments = parser.parse_args()
    try:
        quantized = quantize(arguments.source, arguments.target, arguments.format)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    _print(json.dumps(quantized))


if __name__ == "__main__":
    main()
