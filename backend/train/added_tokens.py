"""Tokens that a run adds to the vocabulary (data.add_special_tokens, data.add_tokens): in the tokenizer, as rows of the
embeddings, and which of these rows an adapter trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from safetensors import safe_open
from tokenizers import AddedToken
from torch.distributed.tensor import DTensor

from backend.config import RunSpec
from backend.train.patches import peft_resized_embeddings
from backend.train.run_log import TrainError

ROUTING_TABLE = "tid2eid"
SEED = 0  # of new rows, which must be the same on all ranks, after a resume, and in a reference model


def add(spec: RunSpec, tokenizer: Any) -> None:
    """Add the tokens that the tokenizer does not have as whole tokens yet."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    special = set(spec.data.add_special_tokens)
    new = [
        AddedToken(token, normalized=False, special=token in special)
        for token in spec.data.added_tokens
        if token not in known
    ]
    tokenizer.add_tokens(new)


def ids(spec: RunSpec, tokenizer: Any) -> list[int]:
    """The ids of the tokens, ascending, including tokens that the tokenizer already had."""
    return sorted(int(tokenizer.convert_tokens_to_ids(token)) for token in spec.data.added_tokens)


def sizes(spec: RunSpec, tokenizer: Any) -> tuple[int, int]:
    """The rows that an embedding needs for the tokenizer: without the tokens of `spec`, and with them."""
    vocabulary, added = tokenizer.get_vocab(), set(spec.data.added_tokens)
    known = (number for token, number in vocabulary.items() if token not in added)
    return 1 + max(known, default=-1), 1 + max(vocabulary.values())


def fit_embeddings(spec: RunSpec, model: Any, tokenizer: Any) -> None:
    """Give the embeddings of `model` a row for each token of `tokenizer`. New rows are the mean of the others, as
    transformers makes them. Raises TrainError if other tokens than those of `spec` have no row."""
    rows, (known, needed) = model.get_input_embeddings().num_embeddings, sizes(spec, tokenizer)
    if known > rows:
        raise TrainError(
            f"The tokenizer has {known:,} tokens, but the model's embedding has {rows:,} rows: they do not belong "
            "together. Use the tokenizer of this model."
        )
    if needed <= rows:  # many models have spare rows
        return
    if isinstance(model.get_input_embeddings().weight, DTensor):
        raise TrainError(
            "data.add_tokens: tensor parallelism has split the embeddings, so they cannot get new rows. Set "
            "parallel.strategy to another strategy."
        )
    peft_resized_embeddings.apply()
    device = model.get_input_embeddings().weight.device
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_type_with_random_state(device)):
        torch.manual_seed(SEED)
        model.resize_token_embeddings(needed)
    _fit_routing_tables(model, rows, needed)


def fit_to_adapter(model: Any, folder: Path) -> None:
    """Give the embeddings of `model` as many rows as those that the adapter in `folder` has trained whole.
    LLaMA-Factory 0.9.5 rounds their number up to a multiple of 64 (model/model_utils/embedding.py)."""
    embedding, file = model.get_input_embeddings(), folder / "adapter_model.safetensors"
    if not file.is_file():
        return
    name = next(name for name, module in model.named_modules() if module is embedding)
    with safe_open(file, "pt") as saved:
        keys = [key for key in list(saved.keys()) if key.endswith(f".{name}.weight")]
        rows = [saved.get_slice(key).get_shape()[0] for key in keys]
    if max(rows, default=0) > embedding.num_embeddings:
        model.resize_token_embeddings(max(rows), mean_resizing=False)


def _fit_routing_tables(model: Any, rows: int, needed: int) -> None:
    """DeepSeek V4 looks up the experts of a token by its id. transformers 5.23 does not enlarge this table, which the
    saved model would have with more rows: new tokens get the experts of the first ones."""
    for module in model.modules():
        table = getattr(module, ROUTING_TABLE, None)
        if isinstance(table, torch.Tensor) and len(table) == rows:
            setattr(module, ROUTING_TABLE, torch.cat([table, table[torch.arange(needed - rows) % rows]]))


def _type_with_random_state(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def trained_rows(model: Any, numbers: Sequence[int], saved: Sequence[str]) -> Mapping[str, list[int]] | None:
    """peft's trainable_token_indices: the names of the input embedding and, unless it has the same weights, of the
    output layer, each with the ids `numbers`. Modules in `saved`, which are trained whole, are left out. None if there
    is nothing to train. Raises TrainError."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[id(layer)]: [*numbers] for layer in layers}
    found = {name: rows for name, rows in found.items() if not any(f".{name}".endswith(f".{part}") for part in saved)}
    if numbers and head is not None and names[id(head)] in found and getattr(head, "bias", None) is not None:
        raise TrainError(
            f"data.add_tokens: the output layer {names[id(head)]} has a bias, which peft leaves out if it trains only "
            f"some rows. Add {names[id(head)]} to lora.modules_to_save."
        )
    return found if numbers and found else None


def check_tied(model: Any) -> None:
    """Raise TrainError if the output layer of an adapted `model` has the same weights as the input embedding, and would
    not get its trained rows: peft only reads from the model's configuration whether they are tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, TrainableTokensWrapper) or head is None or isinstance(head, TrainableTokensWrapper):
        return
    if getattr(head, "weight", None) is embedding.original_module.weight:
        raise TrainError(
            "data.add_tokens: the input embedding and the output layer have the same weights, and peft does not know "
            "it, because tie_word_embeddings is false in config.json. Set it to true there."
        )
