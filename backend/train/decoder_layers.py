"""Where the decoder layers of a model are."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

TOWER = re.compile(r"vision|visual|image|audio")  # in the names of modules


def layer_lists(model: Any) -> list[tuple[str, nn.ModuleList]]:
    """(path, list) of every list of modules. A vision or audio tower may have as many layers as the text decoder, so
    the lists of the decoder come first."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    inside = {id(module) for module in _decoder(model).modules()}
    return sorted(lists, key=lambda item: (id(item[1]) not in inside, bool(TOWER.search(item[0]))))


def decoder_layers(model: Any) -> tuple[str, int]:
    """(path, length) of the list of decoder layers, which has num_hidden_layers modules; ("", 0) if there is none."""
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    return next(((name, len(module)) for name, module in layer_lists(model) if len(module) == depth), ("", 0))


def outermost_layers(model: Any) -> list[str]:
    """The paths of the decoder's layers. A model that runs several lists of layers in turn, such as HRM-Text, has none
    with num_hidden_layers modules; then all lists count that are not inside another one, or in a tower."""
    path, depth = decoder_layers(model)
    lists = [(path, depth)] if depth else [(name, len(m)) for name, m in layer_lists(model) if not TOWER.search(name)]
    outer = [(name, count) for name, count in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [f"{name}.{number}" for name, count in outer for number in range(count)]


def _decoder(model: Any) -> nn.Module:
    try:
        decoder = model.get_decoder()
    except Exception:  # not implemented by some classes
        decoder = None
    found: nn.Module = decoder if isinstance(decoder, nn.Module) else model
    return found
