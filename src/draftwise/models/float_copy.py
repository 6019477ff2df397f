"""A copy of a model in float32 that is small enough to be made beside the model."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.quantization import (
    StoredRows,
    expand_weights,
    forget_stored,
    stored_experts,
    stored_rows,
)
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.packed import expanded_rows
from draftwise.models.hidden_states import decoder_layers
from draftwise.models.packed_modules import pack_experts

# With two layers, a layer that reads the keys of another one is noticed.
_LEAST_LAYERS = 2
# Most bytes of the copied layers, relative to the model's, and for small models.
_LARGEST_SHARE = 0.25
_FEW_BYTES = 2**30
_NUM_TOKENS = 64
# What layers call their index.
_INDICES = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx"})


class FloatCopy:
    """The first layers of a model in float32, with a vocabulary of a few tokens.

    Experts that are kept in the blocks of a file stay in blocks.

    The layers are as few as contain every kind of layer, within a share of the model's size.

    Attributes:
        model: the copy.
        ids: ``[1, length]`` token ids in the vocabulary of the copy.
        num_layers: number of its layers.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        """Copy a model.

        Args:
            model: a causal language model.
            ids: ``[1, length]`` token ids that the copy must have.

        Raises:
            UnsupportedModelError: the model's layers are not found.
        """
        stack = decoder_layers(model)
        self.num_layers = _num_layers(model, stack)
        tokens = _tokens(model.get_input_embeddings(), ids)
        self.ids = torch.searchsorted(tokens, ids)
        # Instead of these objects, deepcopy puts the given ones into the copy.
        instead: dict[int, Any] = {id(layer): nn.Identity() for layer in stack[self.num_layers :]}
        head = model.get_output_embeddings()
        vocabulary = [*_tables(model), *([head] if isinstance(head, nn.Linear) else [])]
        for module in vocabulary:
            for parameter in module.parameters():
                stored = stored_rows(module) if parameter.is_meta else ()
                instead[id(parameter)] = _rows(parameter, stored, tokens)
        for module in model.modules():
            kept: tuple[object, ...] = (stored_rows(module), stored_experts(module))
            # Shared with the model while it is copied.
            instead.update({id(each): each for each in kept if each})
        self.model = copy.deepcopy(model, instead)
        del decoder_layers(self.model)[self.num_layers :]
        for module in self.model.modules():
            _expand(module)
        expand_weights(self.model)
        self.model.float()
        for table in _tables(self.model):
            table.num_embeddings, table.padding_idx = len(tokens), None
        copied_head = self.model.get_output_embeddings()
        if isinstance(copied_head, nn.Linear):
            copied_head.out_features = len(copied_head.weight)


def _tables(model: Any) -> list[nn.Embedding]:
    """The embeddings of tokens."""
    size = model.get_input_embeddings().num_embeddings
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == size
    ]


def _tokens(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """``[tokens]`` the tokens of a copy in ascending order: given ones, and the first ones."""
    count = min(_NUM_TOKENS, embedding.num_embeddings)
    tokens: Tensor = torch.unique(torch.cat([ids[0], torch.arange(count, device=ids.device)]))
    return tokens


def _expand(module: Any) -> None:
    """Replace what a layer keeps of a file by its weight. Experts, which are large, are packed."""
    stored = stored_rows(module)
    if stored and module.weight.is_meta:
        module.weight = nn.Parameter(_expanded(stored), requires_grad=False)
    if stored_experts(module):
        pack_experts(module)  # the native kernels pack them once more
    else:
        forget_stored(module)


def _expanded(stored: Sequence[StoredRows]) -> Tensor:
    library = native_library()
    assert library is not None
    return expanded_rows(stored, library)


def _rows(parameter: nn.Parameter, stored: Sequence[StoredRows], tokens: Tensor) -> nn.Parameter:
    """Some rows of a parameter, whose weight may be quantised, or stored in parts."""
    if stored:
        ends = torch.tensor([len(part) for part in stored]).cumsum(0)
        starts = [0, *ends[:-1].tolist()]
        pieces = [
            part.taken(tokens[(tokens >= start) & (tokens < end)] - start)
            for part, start, end in zip(stored, starts, ends.tolist(), strict=True)
        ]
        return nn.Parameter(_expanded(pieces), requires_grad=False)
    values: Any = parameter.detach()
    if hasattr(values, "dequantize") and type(parameter) is not nn.Parameter:
        values = values.dequantize()
    return nn.Parameter(values[tokens.to(values.device)].clone(), requires_grad=False)


def _num_layers(model: Any, stack: nn.ModuleList) -> int:
    """How many of the first layers are copied."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(stack)
    kinds: dict[Hashable, int] = {}
    for index, layer in enumerate(stack):
        kinds.setdefault((types[index], _kind(layer)), index)
    count = max(_LEAST_LAYERS, 1 + max(kinds.values()))
    itemsize = torch.float32.itemsize
    sizes = [itemsize * sum(each.numel() for each in layer.parameters()) for layer in stack]
    limit = max(_FEW_BYTES, _LARGEST_SHARE * sum(each.nbytes for each in model.parameters()))
    while count > _LEAST_LAYERS and sum(sizes[:count]) > limit:
        count -= 1
    return min(count, len(stack))


def _kind(layer: nn.Module) -> Hashable:
    """What tells a kind of layer from another: its modules, their settings and shapes."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | str | None) and key not in _INDICES
            ),
            tuple(tuple(each.shape) for each in module.parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )
