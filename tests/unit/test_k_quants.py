"""K-quants: the type of each weight is the one that llama-quantize chooses, and everything else in a file is kept.

gguf's own functions stand in for those of ggml, and know only the types of weights whose rows are not multiples of 256
elements. tests/process/test_gguf_runtime.py compares files with those of llama.cpp, byte by byte.
"""

import ctypes
import json
import sys
from collections import Counter

import gguf
import numpy as np
import pytest

from backend.environments import llama_cpp_quantize
from backend.environments.llama_cpp_quantize import Model, choose_types
from backend.export.tensor_types import QuantizedWeight, describe_replaced, group

NORMS = ("attn_norm", "ffn_norm")


def llama(hidden, layers, inner, vocabulary=49152, experts=0, **options):
    """The tensors of a Llama or Mixtral with tied embeddings and grouped heads."""
    shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden // 3, hidden), "attn_v": (hidden // 3, hidden)}
    shapes |= {"attn_output": (hidden, hidden), **dict.fromkeys(NORMS, (hidden,))}
    matrices = (experts,) if experts else ()
    kind = "_exps" if experts else ""
    shapes |= {f"ffn_{name}{kind}": (*matrices, inner, hidden) for name in ("gate", "up")}
    shapes |= {
        f"ffn_down{kind}": (*matrices, hidden, inner),
        **({"ffn_gate_inp": (experts, hidden)} if experts else {}),
    }
    tensors = {f"blk.{n}.{name}.weight": shape for n in range(layers) for name, shape in shapes.items()}
    return Model({"token_embd.weight": (vocabulary, hidden), **tensors}, layers, experts, **options)


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("q4_k_m", {"Q5_0": 166, "Q4_K": 16, "Q8_0": 15, "Q6_K": 14}),
        ("q5_k_m", {"Q5_1": 166, "Q5_K": 16, "Q8_0": 15, "Q6_K": 14}),
        ("q6_k", {"Q8_0": 181, "Q6_K": 30}),
    ],
)
def test_smollm2(format, expected):
    """The numbers are those of a file that llama-quantize wrote. Rows of 576 elements are not multiples of 256."""
    types = choose_types(llama(576, 30, 1536), format)
    assert Counter(type.name for type in types.values()) == expected
    assert types["token_embd.weight"].name == "Q8_0" and "blk.0.attn_norm.weight" not in types


def test_weights_that_get_more_bits():
    """Those of the first and last eighth of the layers, and each third between them; those of Mixtral and of 70B."""
    model = llama(768, 16, 2048)
    types = choose_types(model, "q4_k_m")
    layers = [n for n in range(16) if types[f"blk.{n}.ffn_down.weight"].name == "Q6_K"]
    assert layers == [0, 1, 4, 7, 10, 13, 14, 15]
    assert layers == [n for n in range(16) if types[f"blk.{n}.attn_v.weight"].name == "Q6_K"]
    assert {types[f"blk.2.{name}.weight"].name for name in ("attn_q", "attn_k", "ffn_up", "attn_v")} == {"Q4_K"}
    untied = Model({**model.tensors, "output.weight": (49152, 768)}, 16)
    found = choose_types(untied, "q4_k_m")
    assert (found["output.weight"].name, found["token_embd.weight"].name) == ("Q6_K", "Q4_K")
    assert {type.name for type in choose_types(model, "q6_k").values()} == {"Q6_K"}
    mixtral = choose_types(llama(768, 6, 512, experts=8), "q4_k_m")
    assert Counter(type.name for type in mixtral.values()) == {"Q8_0": 12, "Q4_K": 22, "Q5_K": 6, "Q6_K": 3}
    assert "blk.0.ffn_gate_inp.weight" not in mixtral
    assert choose_types(llama(768, 80, 512, is_70b=True), "q4_k_m")["blk.11.attn_v.weight"].name == "Q5_K"
    assert choose_types(llama(72, 1, 40), "q4_k_m")["blk.0.attn_q.weight"].name == "F16", "not even blocks of 32"


class Ggml:
    """ggml_quantize_chunk, by gguf."""

    def ggml_quantize_chunk(self, type, source, target, start, rows, columns, importance):
        values = np.ctypeslib.as_array(ctypes.cast(source, ctypes.POINTER(ctypes.c_float)), (rows, columns))
        found = np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType(type)))
        ctypes.memmove(target, found.ctypes.data, found.nbytes)
        return found.nbytes


@pytest.fixture
def source(tmp_path):
    """Writes a GGUF file with 16 bits per element."""

    def write(value=1.0):
        writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
        writer.add_block_count(1)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_token_list(["a", "b"])
        values = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float16)
        values[3, 5] = value
        writer.add_tensor("token_embd.weight", values)
        writer.add_tensor("blk.0.attn_q.weight", values)
        writer.add_tensor("blk.0.attn_norm.weight", np.ones(96, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "whole.gguf"

    return write


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["quantize", *map(str, arguments)])
    llama_cpp_quantize.main()


def test_a_file_keeps_everything_but_its_weights(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp_quantize, "_library", Ggml)
    whole, files = source(), [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for file, chunk in zip(files, (2**24, 1000), strict=True):
        monkeypatch.setattr(llama_cpp_quantize, "CHUNK", chunk)
        run(monkeypatch, whole, file, "q4_k_m")
    assert files[0].read_bytes() == files[1].read_bytes(), "chunks of rows change nothing"
    *progress, last = capsys.readouterr().out.splitlines()
    assert progress[0] == "Writing: 0%" and len(progress) > 15
    assert json.loads(last) == [["token_embd.weight", 96, "Q8_0"], ["blk.0.attn_q.weight", 96, "Q5_0"]]
    before, after = (gguf.GGUFReader(path) for path in (whole, files[0]))
    changed = {name for name, field in after.fields.items() if field.contents() != before.fields[name].contents()}
    assert changed - {"GGUF.kv_count"} == {"general.file_type"} and set(after.fields) == set(before.fields)
    types = {tensor.name: tensor.tensor_type.name for tensor in after.tensors}
    assert types == {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q5_0", "blk.0.attn_norm.weight": "F32"}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = gguf.dequantize(new.data, new.tensor_type)
        assert np.allclose(values, old.data.astype(np.float32), atol=0.3) and values.shape == old.data.shape


def test_weights_that_are_not_finite(source, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp_quantize, "_library", Ggml)
    with pytest.raises(
        SystemExit, match=r"The weight token_embd\.weight has NaN or infinite values in 16 bits. Export as bf16"
    ):
        run(monkeypatch, source(np.inf), tmp_path / "a.gguf", "q6_k")


def test_a_library_without_the_function(source, tmp_path, monkeypatch):
    module = type(sys)("xllamacpp.xllamacpp")
    module.__file__ = "xllamacpp.so"
    monkeypatch.setitem(sys.modules, "xllamacpp", type(sys)("xllamacpp"))
    monkeypatch.setitem(sys.modules, "xllamacpp.xllamacpp", module)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.raises(SystemExit, match="Export as q8_0, f16 or bf16 instead"):
        run(monkeypatch, source(), tmp_path / "a.gguf", "q6_k")


def test_the_sentence_about_replaced_types():
    weights = [QuantizedWeight("a", 576, "Q5_0"), QuantizedWeight("b", 1536, "Q4_K"), QuantizedWeight("c", 576, "Q8_0")]
    assert group(weights) == {"Q4_K": ["b"], "Q5_0": ["a"], "Q8_0": ["c"]}
    sentence = describe_replaced(weights, "q4_k_m")
    assert sentence.startswith("2 of 3 quantized weights have rows of 576 elements") and "Q5_0 and Q8_0" in sentence
    assert describe_replaced([QuantizedWeight("b", 1536, "Q4_K")], "q4_k_m") == ""
