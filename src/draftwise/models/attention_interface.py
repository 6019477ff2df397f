"""Packed attention as an attention function of ``transformers``, and what a model's layers need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from draftwise.checkpoints.support import ATTENTION_NAME
from draftwise.errors import UnsupportedModelError
from draftwise.models.attention import attend
from draftwise.models.attention_scores import Scores
from draftwise.models.layer_shape import LayerShape
from draftwise.models.packing import PackedBatch
from draftwise.models.recurrent.functions import RecurrentProbe
from draftwise.models.recurrent.plan import recurring

# Arguments that change attention and are supported.
_SUPPORTED = frozenset({"sliding_window", "softcap", "s_aux"})
# Arguments that Hugging Face's modules pass and that do not affect the result here.
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "position_embeddings",
        "is_causal",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "cache_position",
        "logits_to_keep",
    }
)


class ShapeProbe:
    """Stand-in for a :class:`PackedBatch` that records what each layer stores and attends to.

    Attributes:
        layers: shape of each layer's keys and values, by layer index.
        max_model_len: longest context that is served. A span of at least this many tokens is no
            limit.
        recurrent: records what layers with a recurrence keep.
    """

    def __init__(self, role: str, max_model_len: int) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.recurrent = RecurrentProbe()
        self.max_model_len = max_model_len
        self._role = role

    def record(
        self, module: nn.Module, keys: Tensor, values: Tensor, extra: Mapping[str, Any]
    ) -> None:
        """Record a layer's shapes.

        Args:
            module: the attention module.
            keys: ``[1, kv_heads, tokens, key_size]``.
            values: ``[1, kv_heads, tokens, value_size]``.
            extra: the module's further arguments.

        Raises:
            UnsupportedModelError: the layer uses attention that is not supported.
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        for name, value in extra.items():
            if value is not None and value is not False and name not in _SUPPORTED | _HARMLESS:
                raise UnsupportedModelError(
                    self._role,
                    f"layer {layer} uses attention with {name!r}, which is not supported",
                )
        self.layers[layer] = LayerShape(
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
            self._limit(extra.get("sliding_window")),
            self._limit(_chunk(module, layer)),
            extra.get("softcap") is None and extra.get("s_aux") is None,
        )

    def _limit(self, span: int | None) -> int | None:
        return None if span is None or span >= self.max_model_len else span


def _chunk(module: nn.Module, layer: int) -> int | None:
    """The size of the chunks that limit a layer's attention, according to its configuration."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if not types or types[layer] != "chunked_attention":
        return None
    chunk: int = config.attention_chunk_size
    return chunk


# The plan of the pass that this thread computes. It is no argument of the model, as the modules of
# some families, such as StableLM's, do not pass arguments on to their attention.
_plan: ContextVar[PackedBatch | ShapeProbe | None] = ContextVar("plan", default=None)


@contextmanager
def following(plan: PackedBatch | ShapeProbe) -> Iterator[None]:
    """Within the context, attention and recurrences follow the plan of one forward pass."""
    token = _plan.set(plan)
    try:
        with recurring(plan.recurrent):
            yield
    finally:
        _plan.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention function for ``transformers``' ``AttentionInterface``, called within
    :func:`following`.

    Args:
        module: the attention module, with its ``layer_idx``.
        query: ``[1, heads, tokens, key_size]``.
        key: ``[1, kv_heads, tokens, key_size]``.
        value: ``[1, kv_heads, tokens, value_size]``.
        attention_mask: always ``None``; the plan separates the requests.
        scaling: factor of the scores.
        extra: further arguments of the module. Unsupported ones are refused at load.

    Returns:
        ``[1, tokens, heads, value_size]`` and ``None``.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    packed = _plan.get()
    if isinstance(packed, ShapeProbe):
        packed.record(module, key, value, extra)
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        values = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    assert packed is not None, "packed attention is called outside of a planned pass"

    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        query = query * _temperature_correction(module, packed.positions, query)
    out = attend(
        packed,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Scores(scaling, extra.get("softcap"), extra.get("s_aux")),
    )
    return out.unsqueeze(0), None


def _temperature_correction(module: Any, positions: Tensor, query: Tensor) -> Tensor:
    """What queries of Llama 4 are multiplied by, to be scaled by their positions.

    Its layers without rotation scale queries by the position, for which they take the index within
    the pass.

    Args:
        module: the attention module.
        positions: ``[tokens]``.
        query: ``[1, heads, tokens, key_size]``.

    Returns:
        ``[tokens, 1]``.
    """

    def scale(at: Tensor) -> Tensor:
        steps = torch.floor((at.float() + 1.0) / module.floor_scale)
        factor: Tensor = torch.log1p(steps) * module.attn_scale + 1.0
        return factor

    index = torch.arange(query.shape[2], device=query.device)
    return (scale(positions[: query.shape[2]]) / scale(index)).unsqueeze(1).to(query.dtype)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
