"""The keys of model, method and adapter."""

from __future__ import annotations

from backend import registry
from backend.launch.llamafactory.exported import Export
from backend.modelspec import is_attention, matches_any
from backend.paths import model_folder
from backend.registry.llamafactory_names import ATTENTIONS


def write(made: Export) -> None:
    """Add the keys to the table."""
    for part in (_model, _added_tokens, _method):
        part(made)


def _model(made: Export) -> None:
    model = made.spec.model
    where = {"path": model.path, "hub": model.hub_id, "builtin": str(model_folder(model.builtin))}
    made.table["model_name_or_path"] = where[model.source]
    if model.source == "builtin" and not model_folder(model.builtin).is_dir():
        made.different.append("model.builtin: the folder of the model is made when a run of Footplate first uses it")
    if model.source == "hub" and model.revision != "main":
        made.table["model_revision"] = model.revision
    made.written |= {"model.revision", "model.attn_implementation"}
    kernels = {name: key for key, name in ATTENTIONS.items()}
    kernel = model.attn_implementation
    made.table["flash_attn"] = kernels.get(kernel, "auto")
    if kernel not in kernels:
        made.lacks("model.attn_implementation", f"LLaMA-Factory has no {kernel}; auto is written")


def _added_tokens(made: Export) -> None:
    data = made.spec.data
    made.written |= {"data.add_tokens", "data.add_special_tokens"}
    if not data.added_tokens:
        return
    given = {"add_tokens": data.add_tokens, "add_special_tokens": data.add_special_tokens}
    made.table |= {key: ",".join(tokens) for key, tokens in given.items() if tokens}
    made.table["resize_vocab"] = True
    if made.spec.method.kind == "lora":
        what = "the modules in lora.modules_to_save" if made.spec.lora.modules_to_save else "the whole embeddings"
        made.different.append(f"data.add_tokens: LLaMA-Factory trains {what}, not only the rows of these tokens")


def _method(made: Export) -> None:
    spec = made.spec
    made.table["finetuning_type"] = made.value("method.kind")
    if quantization := made.value("method.quantization"):
        bits = registry.QUANTIZATIONS[quantization].bits
        made.table |= {"quantization_bit": bits, "quantization_method": "bnb"} if bits else {}
        made.table |= {"quantization_type": quantization} if bits == 4 else {}
    if spec.method.kind == "freeze" and (extra := made.value("method.freeze_extra_modules")):
        made.table["freeze_extra_modules"] = ",".join(dict.fromkeys(_untied(made, name) for name in extra))
        text = "LLaMA-Factory trains everything whose name contains one of them, such as input_layernorm for norm"
        made.different.append(f"method.freeze_extra_modules: {text}")
    if spec.method.kind == "lora":
        _lora(made)


def _untied(made: Export, name: str) -> str:
    """The name of a module, but that of the embeddings for an output layer that is tied to them: LLaMA-Factory looks
    for names of parameters, and PyTorch lists the shared ones once."""
    shape = made.shape
    is_tied_head = shape is not None and shape.tied and matches_any(shape.head, frozenset((name,)))
    return shape.embedding.rpartition(".")[2] if shape is not None and is_tied_head else name


def attention_layers(made: Export, option: str) -> tuple[str, ...]:
    """The names of the model's attention layers with that of the module before them: other layers may have the same
    names. If the model is not known, names that most models have."""
    leaves = [leaf for leaf in made.shape.modules() if leaf.is_linear] if made.shape else []
    found = dict.fromkeys(".".join(leaf.path.split(".")[-2:]) for leaf in leaves if is_attention(leaf.path))
    if not found:
        made.different.append(f"{option}: {OF_ATTENTION}")
    return tuple(found) or registry.ATTENTION_MODULES


OF_ATTENTION = "the names q_proj, k_proj, v_proj and o_proj, which some models do not have"


def _lora(made: Export) -> None:
    lora = made.spec.lora
    made.written |= {"lora.targets", "lora.target_modules", "lora.modules_to_save", "lora.init", "lora.alpha"}
    made.written.add("lora.adapter_path")
    attention = attention_layers(made, "lora.targets") if lora.targets == "attention" else ("all",)
    made.table["lora_target"] = ",".join(lora.target_modules if lora.targets == "custom" else attention)
    made.table["lora_alpha"] = alpha = max(1, round(lora.alpha))  # for 0, LLaMA-Factory would use twice the rank
    if lora.alpha != alpha:
        text = f"{lora.alpha:g} is written as {alpha}, since LLaMA-Factory takes whole numbers from 1 only"
        made.different.append(f"lora.alpha: {text}")
    if lora.adapter_path:
        made.table["adapter_name_or_path"] = made.value("lora.adapter_path")
    if lora.modules_to_save:
        made.table["additional_target"] = ",".join(lora.modules_to_save)
    if lora.init in ("pissa", "pissa_fast"):
        made.table |= {"pissa_init": True, "pissa_iter": -1 if lora.init == "pissa" else 16}
    elif lora.init != "default":
        made.lacks("lora.init", f"LLaMA-Factory has no initialization {lora.init}")
    if lora.loraplus_lr_ratio == 1:  # off; LLaMA-Factory would create its own optimizer for any number
        made.written.add("lora.loraplus_lr_ratio")
