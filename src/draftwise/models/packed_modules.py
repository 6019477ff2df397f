"""Modules of transformers that compute with the blocks of a file.

They are for models that the native kernels do not compute as a whole. Linear layers, experts and
the embedding of a model keep their classes' other methods; only what reads their weights changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.quantization import (
    BlockRows,
    StoredRows,
    stored_experts,
    stored_rows,
)
from draftwise.kernels.native.library import NativeLibrary, native_library
from draftwise.kernels.native.packed import (
    embedding_blocks,
    expand_blocks,
    is_packable,
    multiply_packed,
    packed_weight,
    why_not_packed,
)
from draftwise.models.memory import ScratchMemory

_MEMORY = threading.local()
# Expanded weights are faster in the native kernels if fewer are kept in blocks.
_LEAST_SHARE = 0.5
# The inner weight of experts, and the method that computes what their outer weight reads.
_GATED, _UNGATED = ("gate_up_proj", "_apply_gate"), ("up_proj", "act_fn")


class PackedRows:
    """Packed rows of a weight, and products with them."""

    def __init__(self, parts: Sequence[StoredRows], library: NativeLibrary) -> None:
        """Pack the parts, which follow each other."""
        self._library = library
        self._columns = sum(map(len, parts))
        self._packed = packed_weight([parts], library)

    def __call__(self, rows: Tensor) -> Tensor:
        """``[rows, outputs]`` float32 of ``[rows, inputs]`` float32."""
        if not hasattr(_MEMORY, "scratch"):
            _MEMORY.scratch = ScratchMemory()
        return multiply_packed(rows, self._packed, self._columns, self._library, _MEMORY.scratch)


class _PackedLinear(nn.Linear):
    """A linear layer with packed rows. Its weight is a meta tensor."""

    rows: PackedRows

    def forward(self, input: Tensor) -> Tensor:
        result = self.rows(input.reshape(-1, self.in_features).float())
        if self.bias is not None:
            result += self.bias
        return result.to(input.dtype).view(*input.shape[:-1], self.out_features)


class _StoredEmbedding(nn.Embedding):
    """An embedding whose rows are expanded when they are read. Its weight is a meta tensor."""

    blocks: BlockRows
    library: NativeLibrary

    def forward(self, input: Tensor) -> Tensor:
        numbers = expand_blocks(self.blocks.taken(input.reshape(-1)), self.library)
        return numbers.to(self.weight.dtype).view(*input.shape, self.embedding_dim)


class _PackedExperts(nn.Module):
    """Experts with packed rows. Those that the tokens of a pass chose are read once."""

    # Of each expert: one product, or those of gate and up projection. Some have no gate.
    inner: list[list[PackedRows]]
    outer: list[PackedRows]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own: Any = self
        rows, result = hidden_states.float(), torch.zeros(hidden_states.shape)
        # In the order of the experts, so that a token's sum does not depend on the others.
        for expert in sorted(set(top_k_index.flatten().tolist())):
            if expert >= len(self.outer):  # stands for no expert
                continue
            token, choice = torch.where(top_k_index == expert)
            chosen = rows[token]
            parts = [product(chosen) for product in self.inner[expert]]
            inner = _joined(parts, own.is_concatenated)
            if own.has_bias:
                inner += (own.gate_up_proj_bias if own.has_gate else own.up_proj_bias)[expert]
            activated = own._apply_gate(inner) if own.has_gate else own.act_fn(inner)
            outputs = self.outer[expert](activated)
            if own.has_bias:
                outputs += own.down_proj_bias[expert]
            result.index_add_(0, token, outputs * top_k_weights[token, choice, None].float())
        return result.to(hidden_states.dtype)


def _joined(parts: list[Tensor], is_concatenated: bool) -> Tensor:
    """Outputs of gate and up projection, next to each other or in turn."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if is_concatenated else torch.stack(parts, 2).flatten(1)


def can_pack_modules(model: nn.Module) -> bool:
    """Whether most weights of a model are kept in blocks, and all of these can be computed with."""
    return _share_in_blocks(model) > _LEAST_SHARE and all(
        _can_pack(module)
        for module in model.modules()
        if stored_rows(module) or stored_experts(module)
    )


def _share_in_blocks(model: nn.Module) -> float:
    """Share of the numbers of a model's weights that are kept in blocks."""
    sizes = [(each.numel(), each.is_meta) for each in model.parameters()]
    return sum(size for size, is_kept in sizes if is_kept) / sum(size for size, _ in sizes)


def _can_pack(module: Any) -> bool:
    experts = stored_experts(module)
    if experts:
        known = {"is_concatenated", "has_bias", "has_gate", "has_post_expert_norm"}
        if not all(hasattr(module, name) for name in known):
            return False
        inner, function = _GATED if module.has_gate else _UNGATED
        return (
            experts.keys() == {inner, "down_proj"}
            and hasattr(module, function)
            and not module.has_post_expert_norm
            and all(is_packable(part) for each in experts.values() for part in each)
        )
    if isinstance(module, nn.Embedding):
        return embedding_blocks(stored_rows(module)) is not None
    return type(module) is nn.Linear and why_not_packed([stored_rows(module)]) is None


def pack_modules(model: nn.Module) -> None:
    """Let the modules of a model compute with blocks, in place; see :func:`can_pack_modules`."""
    pack_parts(model)
    _convert_others(model)


def pack_parts(model: nn.Module) -> None:
    """As :func:`pack_modules`, without a change to the parameters that have no blocks."""
    library = native_library()
    assert library is not None
    for module in list(model.modules()):
        stored = stored_rows(module)
        if stored_experts(module):
            pack_experts(module)
        elif stored and isinstance(module, nn.Embedding):
            found = embedding_blocks(stored)
            assert found is not None
            _become(module, _StoredEmbedding)
            module.blocks, module.library = found[0], library  # type: ignore[assignment]
        elif stored:
            module.__class__ = _PackedLinear
            module.rows = PackedRows(stored, library)  # type: ignore[assignment]


def _convert_others(model: Any) -> None:
    """Convert the parameters that have no blocks to the dtype that transformers gives them."""
    dtype = model.get_input_embeddings().weight.dtype
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = {each for name in names for each in getattr(model, name, None) or ()}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def has_packed_modules(model: nn.Module) -> bool:
    """Whether :func:`pack_modules` has packed modules of a model."""
    return any(isinstance(module, _PackedLinear) for module in model.modules())


def has_packed_experts(model: nn.Module) -> bool:
    """Whether experts of a model compute with blocks, and so round their inputs to 8 bits."""
    return any(isinstance(module, _PackedExperts) for module in model.modules())


def pack_experts(module: Any) -> None:
    """Let a layer of experts compute with its blocks, in place."""
    library = native_library()
    assert library is not None
    experts, count = stored_experts(module), len(module.down_proj)

    def packed(part: BlockRows) -> list[PackedRows]:
        size = len(part) // count
        pieces = (part.rows(at * size, (at + 1) * size) for at in range(count))
        return [PackedRows([piece], library) for piece in pieces]

    inner = [packed(part) for part in experts[(_GATED if module.has_gate else _UNGATED)[0]]]
    _become(module, _PackedExperts)
    module.inner = [list(each) for each in zip(*inner, strict=True)]
    (module.outer,) = (packed(part) for part in experts["down_proj"])


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module the forward pass of a class; what its own class adds to it stays."""
    own = type(module)
    if own is nn.Embedding:
        module.__class__ = kind
    elif issubclass(kind, nn.Embedding):  # its own forward pass calls that of nn.Embedding
        module.__class__ = type(f"Stored{own.__name__}", (own, kind), {})
    else:
        module.__class__ = type(f"Packed{own.__name__}", (kind, own), {})
