"""Selection of the models that the native kernels compute, and of the bits of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from draftwise.checkpoints.quantization import quantized_matrix, stored_rows
from draftwise.checkpoints.rotary import depends_on_length, rotary_settings
from draftwise.kernels.native.decoder import ACTIVATIONS, NativeDecoder
from draftwise.kernels.native.experts import are_packed, why_experts_not_packed
from draftwise.kernels.native.head import NativeHead
from draftwise.kernels.native.library import (
    NativeLibrary,
    native_library,
    why_unavailable,
)
from draftwise.kernels.native.narrow import COMPRESSED_BITS, QUANTIZED_BITS, are_compressible
from draftwise.kernels.native.packed import PACKED, embedding_blocks, rows_of, why_not_packed
from draftwise.kernels.native.recurrent import why_no_recurrence
from draftwise.models.decoder_families import decoder_spec, why_not_described
from draftwise.models.decoder_spec import DecoderSpec, NormSpec
from draftwise.models.recurrence_spec import StepSpec

_DTYPES = (torch.bfloat16, torch.float32)
_MIB = 2**20
# Maximum number of bytes of a small model, which stays in the processor's caches. For larger
# models, the native kernels are used only if they read memory faster than PyTorch's.
_SMALL_MODEL = 32 * _MIB
# float32 lanes of the vectors of AVX2. The kernels were not compared with oneDNN on shorter ones.
_LEAST_LANES = 8
# Depth of a tile of the matrix unit (``tiles.h``).
_TILE_DEPTH = 32

_EPSILONS = "its norms have different epsilons, and the native kernels have one"

Head = TypeVar("Head", bound=NativeHead)


def native_decoder(model: nn.Module, even_if_slow: bool = False) -> NativeDecoder | None:
    """Pack a described model for the native kernels.

    Args:
        model: a model that :mod:`draftwise.models.decoder_spec` can describe.
        even_if_slow: whether to pack a model that PyTorch would compute faster.

    Returns:
        ``None`` if the kernels do not support the model.
    """
    library = native_library()
    if library is None or why_not_native(model, even_if_slow) is not None:
        return None
    dtype = _weight(model).dtype
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    spec = decoder_spec(model)
    bits = _stored_bits(spec, layers, library, dtype, is_large(model))
    return NativeDecoder(spec, library, bits)


def native_head(
    kind: type[Head],
    spec: DecoderSpec,
    output_ids: Tensor | None,
    target: NativeDecoder | None = None,
) -> Head | None:
    """Pack a drafting head for the native kernels; ``None`` if they do not support it.

    Args:
        kind: the class of the packed head.
        spec: the head.
        output_ids: ``[draft_vocab]`` int64 target ids of the tokens that it proposes; ``None`` if
            they are all tokens of the target.
        target: the target whose projection to the vocabulary computes the logits; see
            :class:`draftwise.kernels.native.head.NativeHead`.
    """
    library = native_library()
    if library is None or why_no_native_head(spec) is not None:
        return None
    layers = _head_layers(spec)
    dtype = spec.embedding.weight.dtype
    bits = _stored_bits(spec, layers, library, dtype, _is_large_head(layers))
    return kind(spec, library, bits, output_ids, target)


def why_no_native_head(spec: DecoderSpec) -> str | None:
    """The reason why the native kernels do not compute a head, as a clause; ``None`` if they do."""
    weight = spec.embedding.weight
    reason = _why_not_type(weight) or _missing_in_layers(spec)
    if reason is not None or not _is_large_head(_head_layers(spec)):
        return reason
    return _why_not_large(spec, weight)


def packs_head(spec: DecoderSpec) -> bool:
    """Whether the native kernels compute a head with its stored rows."""
    library = native_library()
    if library is None or why_no_native_head(spec) is not None:
        return False
    layers = _head_layers(spec)
    bits = _stored_bits(spec, layers, library, spec.embedding.weight.dtype, _is_large_head(layers))
    return bits == PACKED


def _head_layers(spec: DecoderSpec) -> list[nn.Linear]:
    """The linear layers of a head."""
    assert spec.state_input is not None
    layers = [each for layer in spec.layers for each in layer.linear_layers]
    own_head = [] if spec.head is None else [spec.head]
    return [*layers, spec.state_input.projection, *own_head]


def _is_large_head(layers: Sequence[nn.Linear]) -> bool:
    return sum(each.weight.nbytes for each in layers) > _SMALL_MODEL


def why_not_native(model: nn.Module, even_if_slow: bool = False) -> str | None:
    """The reason why the native kernels do not compute a model.

    Args:
        model: a loaded model that :mod:`draftwise.models.decoder_spec` can describe, whose weights
            are not packed yet.
        even_if_slow: whether to leave out that PyTorch would compute the model faster.

    Returns:
        A clause; ``None`` if the kernels compute the model.
    """
    weight = _weight(model)
    reason = _why_not_type(weight)
    if reason is not None:
        return reason
    causal: Any = model
    spec = decoder_spec(model)
    missing = _missing_feature(spec, causal.config.get_text_config())
    if missing is not None or even_if_slow or not is_large(model):
        return missing
    return _why_not_large(spec, weight)


def _why_not_type(weight: Tensor) -> str | None:
    """Why the kernels do not compute with weights of this device and dtype; ``None`` if they do."""
    if weight.device.type not in ("cpu", "meta"):
        return f"it is on {weight.device.type}, and the native kernels are for the CPU"
    if weight.dtype not in _DTYPES:
        return f"its weights are {_name(weight.dtype)}, not bfloat16 or float32"
    if native_library() is None:
        return f"there are no native kernels: {why_unavailable()}"
    return None


def _why_not_large(spec: DecoderSpec, weight: Tensor) -> str | None:
    """Why the kernels are slower than PyTorch for a large model; ``None`` if they are not."""
    library = native_library()
    assert library is not None
    limit = f"for models of more than {_SMALL_MODEL // _MIB} MiB the native kernels need"
    slower = _why_slower(spec, library)
    if slower is not None:
        return f"{limit} {slower}"
    if weight.dtype != torch.bfloat16 and library.multiplies_tiles:
        return f"its weights are {_name(weight.dtype)}, and {limit} bfloat16"
    return None


def is_large(model: nn.Module) -> bool:
    """Whether a model's weights are too large for the processor's caches."""
    return sum(each.nbytes for each in model.parameters()) > _SMALL_MODEL


def lacks_instructions() -> bool:
    """Whether the kernels would multiply large models slower than oneDNN on this processor."""
    library = native_library()
    return library is not None and _missing_instructions(library) is not None


def _weight(model: Any) -> torch.Tensor:
    # A meta tensor if the file's blocks are kept.
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored_bits(
    spec: DecoderSpec,
    layers: Sequence[nn.Linear],
    library: NativeLibrary,
    dtype: torch.dtype,
    reads_memory: bool,
) -> int:
    """Stored bits per number of the linear layers. Fewer bits reduce the memory traffic."""
    if not reads_memory or dtype != torch.bfloat16:
        return 8 * dtype.itemsize
    if spec.experts and not are_packed(spec.experts):
        return 8 * dtype.itemsize  # experts have the format of the other layers
    matrices = [quantized_matrix(each) for each in layers]
    have_output_scales = all(each is not None and each.has_scale_per_output for each in matrices)
    if have_output_scales and library.multiplies_tiles:
        return QUANTIZED_BITS
    if _why_not_packable(spec) is None:
        return PACKED
    if not library.multiplies_pairs:
        return 8 * dtype.itemsize
    if have_output_scales:
        return QUANTIZED_BITS
    if all(each.in_features % _TILE_DEPTH == 0 for each in layers):
        weights = (each.weight for each in layers)
        if are_compressible(weights, library):
            return COMPRESSED_BITS
    return 8 * dtype.itemsize


def why_not_packed_whole(model: nn.Module) -> str | None:
    """The reason why the kernels do not compute a model with its stored rows.

    Returns:
        A clause; ``None`` if they do.
    """
    reason = why_not_described(model) or why_not_native(model)
    if reason is not None:
        return reason
    spec = decoder_spec(model)
    if embedding_blocks(stored_rows(spec.embedding)) is None:
        return "its embedding is stored without blocks"
    return _why_not_packable(spec)


def _why_not_packable(spec: DecoderSpec) -> str | None:
    """Why not all linear layers can be packed as integers with a scale per group."""
    joined: list[tuple[nn.Linear, ...]] = [] if spec.head is None else [(spec.head,)]
    if spec.state_input is not None:
        joined.append((spec.state_input.projection,))
    for layer in spec.layers:
        joined += [(layer.out,), *([] if layer.down is None else [(layer.down,)])]
    inputs = [layer.qkv for layer in spec.layers]
    gates = [layer.gate_up for layer in spec.layers if layer.gate_up]
    if not all(stored_rows(each) for group in (*joined, *inputs, *gates) for each in group):
        return "some of its linear layers are stored without blocks"
    reasons = [why_not_packed(rows_of(group)) for group in joined]
    for layer in spec.layers:
        order = None if layer.recurrence is None else layer.recurrence.order
        reasons.append(why_not_packed(rows_of(layer.qkv, order)))
    reasons += [why_not_packed(rows_of(group), True) for group in gates]
    reasons += [why_experts_not_packed(each) for each in spec.experts]
    return next(filter(None, reasons), None)


def _missing_feature(spec: DecoderSpec, config: Any) -> str | None:
    """A feature of the layers that the kernels do not support, as a clause; ``None`` if none."""
    for settings in rotary_settings(getattr(config, "rope_parameters", None)):
        if depends_on_length(settings):
            kind = settings["rope_type"]
            return f"its rotary embedding is {kind}, which the native kernels do not have"
    return _missing_in_layers(spec)


def _missing_in_layers(spec: DecoderSpec) -> str | None:
    """The same without what depends on the configuration."""
    if spec.activation not in ACTIVATIONS:
        return f"its activation is {spec.activation}, which the native kernels do not have"
    if spec.head_size % 2 or any(table.size % 2 for table in spec.rotary.values()):
        return f"its heads have {spec.head_size} numbers, and the native kernels need pairs"
    lacking = next(filter(None, map(why_no_recurrence, spec.recurrences)), None)
    if lacking is not None:
        return lacking
    for layer in spec.layers:
        down = () if layer.down is None else (layer.down,)
        biased = {"gate_proj": layer.gate_up, "down_proj": down}
        for name, linear in biased.items():
            if any(each.bias is not None for each in linear):
                return f"its {name} has a bias, which the native kernels do not have"
        step = None if layer.recurrence is None else layer.recurrence.step
        norms = (layer.attention_norm, layer.mlp_norm, layer.attention_out_norm)
        if not _have_epsilon(spec, *norms, layer.mlp_out_norm, layer.q_norm, layer.k_norm, step):
            return _EPSILONS
    reads = spec.state_input
    if reads is not None:
        norms = (reads.embedding_norm, reads.joint_norm, reads.state_norm)
        if not _have_epsilon(spec, *norms, *reads.norms):
            return _EPSILONS
    return None


def _have_epsilon(spec: DecoderSpec, *norms: NormSpec | StepSpec | None) -> bool:
    """Whether norms have the epsilon of the model's final norm."""
    return all(norm is None or norm.epsilon == spec.norm.epsilon for norm in norms)


def _why_slower(spec: DecoderSpec, library: NativeLibrary) -> str | None:
    """What the kernels need to multiply bfloat16 as fast as oneDNN; ``None`` if they do so.

    oneDNN uses a matrix unit for all sizes, the kernels only for multiples of a tile. Without a
    matrix unit, the kernels are faster with AVX2 and AVX-512, with or without instructions for
    bfloat16.
    """
    if library.multiplies_tiles:
        # Layers with a recurrence may have another depth than those with attention.
        kinds = {layer.recurrence is None: layer for layer in reversed(spec.layers)}
        depths = [each for layer in kinds.values() for each in (layer.qkv[0], layer.out)]
        depths += [each.down for each in spec.layers[:1] if each.down is not None]
        if spec.state_input is not None:
            depths.append(spec.state_input.projection)
        for layer in depths:
            if layer.in_features % _TILE_DEPTH:
                return f"sizes that are multiples of {_TILE_DEPTH}, and one is {layer.in_features}"
        return None
    return _missing_instructions(library)


def _missing_instructions(library: NativeLibrary) -> str | None:
    """The missing requirement on the processor; ``None`` if none is missing."""
    if library.multiplies_tiles:
        return None
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if "amx_bf16" in flags:
        return "the right to use the processor's matrix unit (AMX)"
    return None if "avx2" in flags and library.lanes >= _LEAST_LANES else "a processor with AVX2"
