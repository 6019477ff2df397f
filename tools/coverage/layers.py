"""A few layers of a model in which every kind of layer occurs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

_LEAST_LAYERS, _MOST_LAYERS = 2, 10
# The first so many layers are of another kind than those after them.
_FIRST = {
    "first_k_dense_replace",
    "num_dense_layers",
    "max_window_layers",
    "moe_layer_start_index",
    "moe_layer_end_index",
}
# The last so many layers are of another kind than those before them.
_LAST = {"num_kv_shared_layers"}
# Names of lists of the layers that are of another kind.
_INDICES = re.compile(r"(layers|layer_ids|indices|idxs)$")


def fewer_layers(config: PreTrainedConfig, names: Sequence[str]) -> dict[str, Any]:
    """Settings for a few layers, as different from each other as all of them are.

    Layers differ in their entry of any list with an entry per layer, such as ``layer_types``, and
    by settings such as ``first_k_dense_replace``.

    Args:
        config: the configuration with all layers.
        names: its settings.

    Returns:
        Values of the settings that change; empty for a model without layers of that name.
    """
    number = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    values = {name: value_of(config, name) for name in names}
    count = values.get(number) or len(values.get("layers_block_type") or ())
    if not isinstance(count, int) or count < 1:
        return {}
    lists = {k: list(v) for k, v in values.items() if _is_per_layer(v, count)}
    indices = {
        name: set(value)
        for name, value in values.items()
        if name not in lists and _INDICES.search(name) and _is_indices(value, count)
    }
    first = {k: v for k, v in values.items() if k in _FIRST and _is_inside(v, count + 1)}
    last = {k: v for k, v in values.items() if k in _LAST and _is_inside(v, count + 1)}

    def kind(layer: int) -> str:
        entries = [each[layer] for each in lists.values() if each != [*range(count)]]
        members = [layer in each for each in indices.values()]
        sides = [layer < each for each in first.values()]
        return repr((entries, members, sides, [layer >= count - each for each in last.values()]))

    kept = _examples([kind(layer) for layer in range(count)])
    changed: dict[str, Any] = {name: [each[i] for i in kept] for name, each in lists.items()}
    changed |= {
        name: [*range(len(kept))] for name, each in lists.items() if each == [*range(count)]
    }
    changed |= {
        name: [new for new, old in enumerate(kept) if old in each] for name, each in indices.items()
    }
    changed |= {name: sum(old < each for old in kept) for name, each in first.items()}
    changed |= {name: sum(old >= count - each for old in kept) for name, each in last.items()}
    return {number: len(kept), **changed} if number in values else changed


def value_of(config: PreTrainedConfig, name: str) -> Any:
    """A setting; of those that differ by layer, what holds for the others."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and count > 2


def _is_indices(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and all(_is_inside(each, count) for each in value)


def _is_inside(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _examples(kinds: Sequence[str]) -> list[int]:
    """Indices of the first layer of each kind, in order, filled up to the least number."""
    first: Mapping[str, int] = {each: kinds.index(each) for each in dict.fromkeys(kinds)}
    kept = sorted(first.values())[:_MOST_LAYERS]
    others = [index for index in range(len(kinds)) if index not in kept]
    return sorted(kept + others[: max(0, _LEAST_LAYERS - len(kept))])
