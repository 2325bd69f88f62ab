"""`python -m backend.train.describe_model`: build a model on the meta device and print its module table as JSON.

Runs in its own process, because importing torch and transformers takes seconds. No weights are read and nothing is
downloaded. Code of a model's folder (`auto_map`) runs only with --trust-remote-code.

    python -m backend.train.describe_model FOLDER_OR_CONFIG_JSON      one table on stdout
    python -m backend.train.describe_model -                          the config is read from stdin

`backend.train.worker` serves tables to the inspection; `backend.modelspec.from_table` turns a table into a ModelShape.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN, get_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from backend import registry
from backend.inspect.architecture import FORMAT, OWN_CODE
from backend.train.decoder_layers import decoder_layers, layer_lists

MAX_LAYERS = 2000
# Attributes of the text config that ModelShape and the rules use. transformers maps the older names (n_embd, n_head)
# to these.
FACTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size", "max_position_embeddings", "max_seq_len",
    "sliding_window", "layer_types", "hidden_act", "activation_function", "hidden_activation", "tie_word_embeddings",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok",
    "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts", "n_shared_experts",
    "multi_query", "new_decoder_architecture", "num_kv_heads", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "kv_lora_rank", "use_sliding_window", "is_encoder_decoder", "is_decoder",
)  # fmt: skip
# config.json keys that do not change the modules but can make building fail.
IGNORED = (
    "auto_map", "quantization_config", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_name_or_path",
)  # fmt: skip


# Types of AutoModelForCausalLM whose attention is bidirectional, and that AutoModelForMaskedLM does not know.
BIDIRECTIONAL = ("bert-generation", "cpmant", "xlnet")


class Refused(ValueError):
    """There is no table for this config; the message is the reason."""


def describe(config: Mapping[str, Any], folder: str = "") -> dict[str, Any]:
    """The module table of `config`. `folder`: run the code of this model folder (trust_remote_code). Raises Refused."""
    kind = str(config.get("model_type") or "")
    if kind and kind not in CONFIG_MAPPING and "auto_map" not in config and not folder:
        return {"format": FORMAT, "transformers": transformers.__version__, "model_type": kind, "kind": "unknown"}
    made = _config(config, folder)
    known = folder or type(made) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    scores = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(made), None)
    table = {
        "format": FORMAT,
        "transformers": transformers.__version__,
        "model_type": str(config.get("model_type")),
        "kind": _kind(made),
        "causal_lm": bool(known),
        "sequence_classification": _class_names(scores)[0] if scores else "",
        "facts": _facts(made),
    }
    if not known:
        return table
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, trust_remote_code=bool(folder))
    except Exception as error:  # a config can break the constructor in any way
        raise Refused(f"transformers {transformers.__version__} cannot build the model: {first_line(error)}") from error
    return {**table, **_described(model)}


def _config(config: Mapping[str, Any], folder: str) -> Any:
    """The config object. Raises Refused."""
    kind = str(config.get("model_type") or "")
    try:
        if folder:
            return AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        if not kind:
            raise Refused("config.json has no model_type")
        if kind not in CONFIG_MAPPING:  # known only to its own code (auto_map), which is not run
            raise Refused(f"transformers {transformers.__version__} has no architecture {kind}; {OWN_CODE}")
        config_class = CONFIG_MAPPING[kind]
        values = {k: v for k, v in config.items() if k not in IGNORED}
        # save_pretrained writes an infinite number as {"__float__": "Infinity"}.
        made = config_class.from_dict(config_class._decode_special_floats(values))
        layers = _fact(made.get_text_config(decoder=True), "num_hidden_layers")
    except Refused:
        raise
    except Exception as error:  # config classes validate their arguments with errors of many kinds
        raise Refused(f"config.json of the {kind} model is invalid: {first_line(error)}") from error
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise Refused(f"num_hidden_layers is {layers:,}; at most {MAX_LAYERS:,} are supported")
    return made


def first_line(error: Exception) -> str:
    """The name and the first line of an error, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def _kind(made: Any) -> str:
    """Whether the architecture is a decoder, an encoder, an encoder-decoder, a model that reads images, too, or
    something else (vision, audio, ...)."""
    auto, kind = modeling_auto, type(made)
    # The decoder of such a type was trained with the output of its encoder, also where it is loaded alone.
    if getattr(made, "is_encoder_decoder", False) or getattr(kind, "is_encoder_decoder", False):
        return "encoder-decoder"
    is_encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING or made.model_type in BIDIRECTIONAL
    if is_encoder and not getattr(made, "is_decoder", False):
        return "encoder"
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(made, "auto_map"):
        return "decoder"
    return "image-text" if kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else "other"


def _class_names(found: Any) -> list[str]:
    return [cls.__name__ for cls in (found if isinstance(found, tuple) else (found,))]


def _fact(text: Any, name: str) -> Any:
    """An attribute as a JSON value; None where it is absent. Where layers differ (transformers' per-layer configs
    raise), the most frequent value."""
    try:
        value = getattr(text, name, None)
    except Exception:
        try:
            each = [getattr(layer, name, None) for layer in text.per_layer_config]
        except Exception:
            return None
        value = max(set(map(str, each)), key=list(map(str, each)).count) if each else None
        value = next((one for one in each if str(one) == value), None)
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, (str, int, float))]
    return value if isinstance(value, (str, int, float, bool)) else None


def _facts(made: Any) -> dict[str, Any]:
    text = made.get_text_config(decoder=True)
    found = {name: _fact(text, name) for name in FACTS}
    found["tie_word_embeddings"] = _fact(made, "tie_word_embeddings")
    return {name: value for name, value in found.items() if value is not None}


def _described(model: Any) -> dict[str, Any]:
    """The parts of the table that need the built model."""
    modules = list(_modules(model))
    stack, depth = _stack(model)
    layers, non_layer_modules = _layers(model, stack, depth, modules)
    text = model.config.get_text_config(decoder=True)
    head, inputs = model.get_output_embeddings(), _input_embeddings(model)
    names = {id(module): name for name, module in model.named_modules()}
    linear = {entry["path"].rpartition(".")[2] for entry in modules if entry["type"] in ("linear", "conv1d")}
    own = str(getattr(model.config, "model_type", ""))
    return {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
        "matches_depth": depth == _fact(text, "num_hidden_layers"),
        "non_layer_modules": non_layer_modules,
        "head": names.get(id(head), ""),
        "embeddings": names.get(id(inputs), ""),
        "tied": _tied(model),
        "class_names": _classes(model, stack),
        "attributes": sorted(
            {part for name in names.values() for part in name.split(".") if not part.isdigit() and part}
        ),
        "no_split_modules": sorted(model._no_split_modules or ()),
        "unsupported_attentions": _unsupported_attentions(model),
        "tensor_parallel_plan": _tensor_parallel_plan(model, names.get(id(head), "")),
        "activation_checkpointing": bool(model.supports_gradient_checkpointing),
        **(peft := _peft(own, linear, modules)),
        "lora_refused": sorted(
            {*peft["lora_refused"], *_unusual_linear(model), *registry.NOT_CALLED.get(own, ()), *_unloadable(model)}
        ),
    }


def _unsupported_attentions(model: Any) -> list[str]:
    """The attention implementations that transformers refuses for the model or, if it has kernels of its own for
    FlashAttention, replaces by one of them."""
    kernels = getattr(model, "_compatible_flash_implementations", None)
    supported = {"sdpa": model._supports_sdpa, "flex_attention": model._supports_flex_attn}
    for name in registry.FLASH_ATTENTIONS:
        supported[name] = model._supports_flash_attn and (kernels is None or name in kernels)
    return sorted(name for name, is_supported in supported.items() if not is_supported)


def _tensor_parallel_plan(model: Any, head: str) -> str:
    """What transformers' tensor parallel plan shards: "layers"; only the output layer ("head"), which a reward model
    does not have; or '' without a plan."""
    names = {*(model.tp_plan or ())}
    return "layers" if names - {head} else "head" if names else ""


def _unusual_linear(model: Any) -> set[str]:
    """Names of linear layers that do not return one tensor of their `out_features`, such as routers. An adapter adds
    its output to that of the layer, so it cannot be put on them."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            try:
                output = module(torch.empty(1, 1, module.in_features, dtype=module.weight.dtype, device="meta"))
            except Exception:  # the layer expects an input of another shape
                output = None
            if not isinstance(output, torch.Tensor) or output.shape != (1, 1, module.out_features):
                found.add(name.rpartition(".")[2])
    return found


def _unloadable(model: Any) -> set[str]:
    """Names of linear layers whose adapter peft ignores when it loads a trained adapter."""
    if get_checkpoint_conversion_mapping(getattr(model.config, "model_type", "")) is None:
        return set()
    from backend.train import adapter_names  # noqa: PLC0415  (peft takes 1.5 s)

    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    return {layer.rpartition(".")[2] for layer in adapter_names.ignored_layers(model, layers)}


def _input_embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except Exception:  # not implemented by some classes
        return None


def _modules(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Every module with parameters of its own. A parameter that an earlier module owns too is listed under `tied`."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [(key, value) for key, value in module._parameters.items() if value is not None]
        if not own:
            continue
        tied = [key for key, value in own if id(value) in seen]
        seen.update(id(value) for _, value in own)
        kind = (
            "linear" if isinstance(module, nn.Linear)
            else "embedding" if isinstance(module, nn.Embedding)
            else "conv1d" if isinstance(module, Conv1D)
            else "experts" if _is_experts(module)
            else "other"
        )  # fmt: skip
        found = {"path": name, "class": type(module).__name__, "type": kind}
        shapes = {key: list(value.shape) for key, value in own}
        yield {**found, "parameters": shapes, **({"tied": tied} if tied else {})}


def _is_experts(module: nn.Module) -> bool:
    """Whether the module holds the matrices of several experts in one 3-D parameter."""
    stacked = any(value is not None and value.dim() == 3 for value in module._parameters.values())
    return stacked and "expert" in type(module).__name__.lower()


def _stack(model: Any) -> tuple[str, int]:
    """Path and length of the list of decoder layers, else of the list with the most parameters."""
    path, depth = decoder_layers(model)
    if depth:
        return path, depth
    sizes = ((sum(p.numel() for p in m.parameters()), name, len(m)) for name, m in layer_lists(model))
    _, path, depth = max(sizes, default=(0, "", 0))
    return path, depth


def _layers(
    model: Any, stack: str, depth: int, modules: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The decoder layers, identical ones listed once, and the modules outside of them."""
    each: list[list[dict[str, Any]]] = [[] for _ in range(depth)]
    non_layer_modules = []
    for entry in modules:
        inside = stack and entry["path"].startswith(f"{stack}.")
        if not inside:
            non_layer_modules.append(entry)
            continue
        number, _, path = entry["path"][len(stack) + 1 :].partition(".")
        each[int(number)].append({**entry, "path": path})
    kinds: dict[str, int] = {}
    listed: list[dict[str, Any]] = []
    order: list[int] = []
    for number, entries in enumerate(each):
        cls = type(model.get_submodule(f"{stack}.{number}")).__name__
        key = json.dumps([cls, entries])
        if key not in kinds:
            kinds[key] = len(listed)
            listed.append({"class": cls, "modules": entries})
        order.append(kinds[key])
    counted = [{**kind, "count": order.count(number)} for number, kind in enumerate(listed)]
    return {"path": stack, "count": depth, "kinds": counted, "order": order}, non_layer_modules


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(value), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _classes(model: nn.Module, stack: str) -> list[str]:
    """Class names of all modules: the decoder layers first, then the model's own classes, then torch's."""
    layers = [type(module).__name__ for module in model.get_submodule(stack)] if stack else []
    every = [type(module) for module in model.modules()]
    own = [cls.__name__ for cls in every if not cls.__module__.startswith("torch.")]
    return list(dict.fromkeys([*layers, *own, *(cls.__name__ for cls in every)]))


def _peft(kind: str, linear: set[str], modules: list[dict[str, Any]]) -> dict[str, Any]:
    """How peft treats this model type. `expert_targets`: names by which it adapts stacked experts and the router, and
    the parameter each stands for; `lora_refused`: linear layers of Mamba on which it refuses LoRA."""
    mixture = kind in {*_MODEL_TO_CONVERSION_PATTERN, "mixtral", "qwen2_moe"}
    if not mixture and not any(entry["class"] == "Conv1d" for entry in modules):
        return {"expert_targets": {}, "expert_fused": {}, "lora_refused": []}
    from peft.tuners import tuners_utils  # noqa: PLC0415  (takes 1.5 s)
    from peft.utils import transformers_weight_conversion as conversion  # noqa: PLC0415

    like = conversion._MODEL_TO_CONVERSION_PATTERN.get(kind)
    there = conversion.get_checkpoint_conversion_mapping(kind) is not None
    fused = conversion._MOE_FUSED_TARGETS.get(like, {}) if there else {}
    targets = conversion._MOE_TARGET_MODULE_MAPPING.get(like, {}) if fused else {}
    model = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    refused = []
    for name in sorted(linear):
        try:
            tuners_utils._check_lora_target_modules_mamba(SimpleNamespace(peft_type="LORA"), model, name)
        except ValueError:
            refused.append(name)
    return {
        "expert_targets": dict(targets),
        "expert_fused": {name: list(old) for name, old in fused.items()},
        "lora_refused": refused,
    }


def _one(place: str, trust: bool) -> dict[str, Any]:
    """The table of a folder, a config.json, or of the config on stdin."""
    path = Path(place) / "config.json" if place != "-" and Path(place).is_dir() else Path(place)
    try:
        config = json.loads(sys.stdin.read() if place == "-" else path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{place} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise Refused(f"{place} is not a JSON object")
    return describe(config, str(path.parent) if trust and place != "-" else "")


def main() -> int:
    """Print one table, or serve."""
    parser = argparse.ArgumentParser(
        prog="python -m backend.train.describe_model", description="Print a model's modules as JSON."
    )
    parser.add_argument("config", nargs="?", default="-", help="a model folder, a config.json, or - for stdin")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code in the model's folder")
    given = parser.parse_args()
    os.environ.update(registry.NO_GPUS)  # read when CUDA starts, which takes memory of a device
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        print(json.dumps(_one(given.config, given.trust_remote_code)))
    except Refused as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread still waits for stdin
