"""`python -m backend.train.shrink_model FOLDER`: writes a small model with random weights to FOLDER, with the
architecture and the tokenizer of the model in spec.yaml of the working directory.

Only the first layers are kept, as many as it takes for every kind of layer to occur; widths, heads and experts are
divided until at most --parameters are left. Head sizes and the vocabulary stay. The small model has modules of the same
classes as the large one; if that is impossible, none is written.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from backend.config import RunSpec
from backend.config.options import effective
from backend.presets import read
from backend.runs import LOCK, RESULT, SPEC
from backend.runs.files import write_json
from backend.train import device, exit, model
from backend.train.decoder_layers import decoder_layers
from backend.train.run_log import RunLog, TrainError

Values = dict[str, Any]

# Names of config keys, by what they count.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads", "mamba_n_heads", "mamba_num_heads",
    "n_mamba_heads", "swa_num_attention_heads", "linear_num_value_heads", "linear_num_key_heads", "index_n_heads",
)  # fmt: skip
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
)
WIDTHS = (
    "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "lru_width", "width", "word_embed_proj_dim",
    "embedding_size", "attention_hidden_size", "intermediate_size", "ffn_dim", "n_inner", "ff_dim", "d_ff",
    "ffn_hidden_size", "expert_ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp", "mamba_d_ssm",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "dense_intermediate_size",
    "moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "hidden_size_per_layer_input",
    "out_hidden_size", "projection_dim", "conv_dim", "block_ff_dim", "block_dim", "mlp_hidden_size",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")  # of heads
MAX_KINDS = 8  # of layers
ALIGNMENT = 16  # grouped matrix multiplications of experts need rows of a multiple of 16 bytes
TARGET = 50_000_000  # parameters: initialized and trained in a second
TOWER_LAYERS = 2  # of a vision or audio tower
NOT_COPIED = ("quantization_config", "auto_map", "_name_or_path", "transformers_version")


def shrink(config: Any, parameters: int, multiple: int = 1, layers: int = 2) -> Any:
    """The config of a model of the same architecture with at most that many `parameters`, if possible just below
    TARGET. Numbers of heads stay divisible by `multiple` where they are; at least `layers` are kept. Raises
    TrainError."""
    large = _built(config)
    # All layers, but narrower, where other keys depend on the number of layers.
    for depth in (_needed_depth(large, layers), None):
        found = list(_candidates(config, _classes(large), depth, multiple, parameters))
        # The largest below the target first, then those above it.
        for _, small in sorted(found, key=lambda each: (each[0] > TARGET, abs(each[0] - TARGET))):
            if _works(small):
                return small
    raise TrainError(
        f"There is no small model of the architecture {config.model_type} to rehearse with: no version with the "
        f"same modules and at most {parameters:,} parameters computes logits."
    )


def _built(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _classes(built: Any) -> set[str]:
    return {type(module).__name__ for module in built.modules()}


def _works(config: Any) -> bool:
    """Whether a model of this config computes logits."""
    try:
        with torch.no_grad():
            found = AutoModelForCausalLM.from_config(config).eval()(
                input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]), use_cache=False
            )
    except Exception:  # sizes that do not fit together
        return False
    return bool(found.logits.isfinite().all())


def _needed_depth(built: Any, least: int) -> int:
    """How many of the first layers are needed so that every kind of layer occurs, and at least `least`."""
    path, depth = decoder_layers(built)
    text = built.config.get_text_config(decoder=True)
    lists = (value for value in text.to_dict().values() if isinstance(value, list) and len(value) == depth)
    listed = [value for value in lists if len(set(map(str, value))) <= MAX_KINDS]  # not the layers' numbers
    kinds = []
    for number, layer in enumerate(built.get_submodule(path) if depth else ()):
        modules = [(name, type(module).__name__) for name, module in layer.named_modules()]
        sizes = [(name, *value.shape) for name, value in layer.named_parameters()]
        kinds.append(json.dumps([modules, sizes, [value[number] for value in listed]], default=str))
    last = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    return min(max(last, least), depth) if depth else least


def _candidates(
    config: Any, classes: set[str], layers: int | None, multiple: int, parameters: int
) -> Iterator[tuple[int, Any]]:
    """(parameters, config) of narrower and narrower versions that can be built, have the same classes and are small
    enough."""
    text = config.get_text_config(decoder=True).to_dict()
    heads = next((text[name] for name in HEADS if _is_count(text.get(name))), 1)
    multiple = multiple if heads % multiple == 0 else 1
    factors = [f for f in range(1, heads // multiple + 1) if heads // multiple % f == 0]
    factors += [factors[-1] * 2**n for n in range(1, 7)]  # for configs with a separate key for the head size
    for factor in factors:
        try:
            small = type(config).from_dict(_smaller(copy.deepcopy(config.to_dict()), factor, layers, multiple))
            built = _built(small)
        except Exception:  # sizes that the architecture cannot have
            continue
        if _classes(built) == classes and (count := built.num_parameters()) <= parameters:
            yield count, small


def _smaller(values: Values, factor: int, layers: int | None, multiple: int) -> Values:
    """`values` of a config and of the configs in it, with the first `layers` and widths divided by `factor`."""
    new = {name: value for name, value in values.items() if name not in NOT_COPIED}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            is_tower = name != "text_config" and layers is not None
            new[name] = _smaller(value, factor, TOWER_LAYERS if is_tower else layers, 1 if is_tower else multiple)
        elif name in WIDTHS and _is_count(value):
            new[name] = _divided(value, factor, math.lcm(ALIGNMENT, multiple))
        elif name in HEADS and _is_count(value):
            new[name] = _divided(value, factor, multiple if value % multiple == 0 else 1)
        elif name in GROUPS and _is_count(value):
            new[name] = _divided(value, factor, 1)
    _divide_kv_heads(values, new, factor, multiple)
    _reduce_experts(values, new)
    depth = next((values[name] for name in LAYERS if _is_count(values.get(name))), 0)
    if layers is not None and depth > layers:
        new |= {name: layers for name in LAYERS if values.get(name) == depth}
        new |= {
            name: value[:layers] for name, value in values.items() if isinstance(value, list) and len(value) == depth
        }
    return new


def _divide_kv_heads(values: Values, new: Values, factor: int, multiple: int) -> None:
    """Key and value heads must divide the attention heads. If their numbers are equal, they stay equal."""
    heads, left = (next((v[name] for name in HEADS if _is_count(v.get(name))), 0) for v in (values, new))
    for name in KV_HEADS:
        if not _is_count(count := values.get(name)) or not left:
            continue
        unit = multiple if count % multiple == 0 else 1
        wanted = left if count == heads else max(count // factor, unit)
        new[name] = max(d for d in range(1, left + 1) if left % d == 0 and d <= wanted and (d % unit == 0 or d == 1))


def _reduce_experts(values: Values, new: Values) -> None:
    """Twice as many experts as are active for a token, and two in each group of a router that has groups."""
    active = max((values[name] for name in ACTIVE if _is_count(values.get(name))), default=1)
    groups = values["n_group"] if _is_count(values.get("n_group")) else 1
    wanted = groups * max(math.ceil(2 * active / groups), min(groups, 2))
    for name in EXPERTS:
        if _is_count(count := values.get(name)):
            new[name] = min(count, wanted)


def _divided(size: int, factor: int, multiple: int) -> int:
    """`size` / `factor`, rounded up to a `multiple` if `size` is one."""
    unit = multiple if size % multiple == 0 else 1
    return math.ceil(size / factor / unit) * unit


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def described(large: Any, small: Any) -> str:
    """What is smaller, as a sentence."""
    counts = [_millions(_built(config).num_parameters()) for config in (small, large)]
    texts = [config.get_text_config(decoder=True) for config in (small, large)]
    layers, widths = ([getattr(text, name, 0) for text in texts] for name in ("num_hidden_layers", "hidden_size"))
    depth = f"{layers[0]} of {layers[1]}" if layers[0] < layers[1] else f"all {layers[0]}"
    width = f"{widths[0]}" + (f" instead of {widths[1]}" if widths[0] < widths[1] else "")
    return (
        f"The model was a small one of the same architecture with random weights: {depth} layers, hidden size "
        f"{width}, {counts[0]} instead of {counts[1]} parameters."
    )


def _millions(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def write(spec: RunSpec, folder: Path, parameters: int, multiple: int, layers: int, log: RunLog) -> str:
    """Write the small model of the model of `spec`; returns what is smaller. Raises TrainError."""
    source = model.locate(spec, lambda text, fraction: log.progress("shrinking", text, fraction))
    if spec.model.trust_remote_code:
        raise TrainError(
            "model.trust_remote_code: a model with custom code cannot be rehearsed with a small model. Turn it off "
            "if transformers knows the architecture, or rehearse on the planned machine itself."
        )
    try:
        config = AutoConfig.from_pretrained(source.name, **source.options)
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options)
    except Exception as error:  # errors of many kinds: network, name, missing file, broken file
        raise TrainError(f"The config or the tokenizer of {source.name} cannot be loaded: {error}") from error
    small = shrink(config, parameters, multiple, layers)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(small, dtype=getattr(config, "dtype", None) or torch.float32)
    with contextlib.suppress(OSError):  # the model has no generation config
        made.generation_config = GenerationConfig.from_pretrained(source.name, **source.options)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return described(config, small)


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Write the small model of the run in the working directory."""
    parser = argparse.ArgumentParser(prog="python -m backend.train.shrink_model", description="Write a small model.")
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--parameters", type=int, default=200_000_000, help="maximum (default: 200,000,000)")
    parser.add_argument("--multiple", type=int, default=1, help="keep numbers of heads divisible by this (default: 1)")
    parser.add_argument("--layers", type=int, default=2, help="minimum (default: 2)")
    given = parser.parse_args()
    sys.excepthook = exit.print_error
    run, started = Path.cwd(), (Path.cwd() / LOCK).stat().st_mtime
    log = RunLog(run)
    log.start_phase("shrinking", "Building a small model of the same architecture.")
    text = write(effective(read(run / SPEC)), given.folder, given.parameters, given.multiple, given.layers, log)
    log.info(text)
    seconds = round(time.time() - started, 3)
    write_json(run / RESULT, {"peak_bytes": device.peak_bytes("cpu"), "seconds": seconds, "text": text})


if __name__ == "__main__":
    main()
    exit.exit_now()
