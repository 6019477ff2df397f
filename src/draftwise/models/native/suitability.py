"""Which models our own kernels compute, and in how many bits they keep their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftwise.models.native.decoder import NativeDecoder
from draftwise.models.native.library import NativeLibrary, native_library
from draftwise.models.native.narrow import COMPRESSED_BITS, QUANTIZED_BITS, are_compressible
from draftwise.models.quantization import quantized_matrix

_DTYPES = (torch.bfloat16, torch.float32)
# A model of so many bytes stays in the processor's caches; for larger ones the kernels must be
# better at reading memory than the framework's.
_SMALL_MODEL = 32 * 2**20
# Numbers of a column in a tile of the matrix unit (``tiles.h``).
_TILE_DEPTH = 32
# Ways of stretching rotary embeddings that depend on how long the text is.
_MOVING_ROTARY = frozenset({"dynamic", "longrope"})


def native_decoder(model: nn.Module) -> NativeDecoder | None:
    """The kernels for a model of the Llama kind, taken over; ``None`` where there are none."""
    decoder: Any = model.model
    weight = decoder.embed_tokens.weight
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        return None
    library = native_library()
    if library is None or not _is_plain(decoder):
        return None
    size = sum(each.numel() for each in model.parameters()) * weight.element_size()
    if size > _SMALL_MODEL and not (weight.dtype == torch.bfloat16 and _is_best(decoder, library)):
        return None
    is_large = size > _SMALL_MODEL
    return NativeDecoder(model, library, _stored_bits(model, library, weight.dtype, is_large))


def _stored_bits(
    model: nn.Module, library: NativeLibrary, dtype: torch.dtype, is_large: bool
) -> int:
    """In how many bits to store a number of the linear layers: fewer, where that saves reading."""
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    if is_large and dtype == torch.bfloat16 and library.multiplies_pairs:
        if all(quantized_matrix(each) is not None for each in layers):
            return QUANTIZED_BITS
        has_whole_tiles = all(each.in_features % _TILE_DEPTH == 0 for each in layers)
        weights = (each.weight for each in layers)
        if library.multiplies_tiles and has_whole_tiles and are_compressible(weights, library):
            return COMPRESSED_BITS
    return 8 * dtype.itemsize


def _is_plain(decoder: Any) -> bool:
    """Whether the layers have nothing that the kernels leave out."""
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    return (
        decoder.config.hidden_act == "silu"
        and decoder.layers[0].self_attn.head_dim % 2 == 0
        and rope.get("rope_type", "default") not in _MOVING_ROTARY
        and all(
            each.bias is None
            for layer in decoder.layers
            for each in (
                layer.self_attn.o_proj,
                layer.mlp.gate_proj,
                layer.mlp.up_proj,
                layer.mlp.down_proj,
            )
        )
    )


def _is_best(decoder: Any, library: NativeLibrary) -> bool:
    """Whether nothing else multiplies bfloat16 faster here.

    Where there is a matrix unit it must be of use, or oneDNN, which has no need of whole tiles, is
    better; without one pairs are as good as it gets.
    """
    if library.multiplies_tiles:
        attention, mlp = decoder.layers[0].self_attn, decoder.layers[0].mlp
        depths = (
            layer.in_features for layer in (attention.q_proj, attention.o_proj, mlp.down_proj)
        )
        return all(depth % _TILE_DEPTH == 0 for depth in depths)
    has_unit = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return library.multiplies_pairs and not has_unit
