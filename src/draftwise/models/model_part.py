"""Consecutive layers of a model, which later passes continue from.

An early exit drafts with the first layers of the target. The target's pass then computes the other
layers only, on the residual stream that the exit left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from draftwise.kernels.native.part import NativePart
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.kv_cache import KVCache
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment


class PartOutput(NamedTuple):
    """What a pass over some of the layers returns.

    Attributes:
        logits: ``[logit rows, vocab]`` by the model's final norm and head; ``None`` if they are not
            requested.
        stream: ``[tokens, hidden]`` the residual stream after the last of the layers, in the
            precision in which the model computes it; ``None`` if it is not requested.
    """

    logits: Tensor | None
    stream: Tensor | None


class ModelPart:
    """Consecutive layers of a :class:`PackedModel`, with its embedding, final norm and head.

    Attributes:
        layers: indices of the layers.
        adapter: maps the stream for the logits; ``None`` for none.
        native: the native kernels; ``None`` where they do not support the model.
    """

    def __init__(
        self, model: PackedModel, first: int, end: int, adapter: ExitAdapter | None = None
    ) -> None:
        """Share the weights of a model.

        Args:
            model: the model.
            first: index of the first layer.
            end: one past the last layer.
            adapter: maps the stream for the logits; ``None`` for none.
        """
        self.layers = range(first, end)
        self.adapter = adapter
        self._model = model
        self.native: NativePart | None = None
        if model.native is not None:
            self.native = NativePart(model.native, first, end, adapter)

    def forward(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        logit_rows: Sequence[int] | None,
        entering: Tensor | None = None,
        leaves: bool = False,
    ) -> PartOutput:
        """Compute packed tokens and write their keys and values.

        The cache's lengths stay as they are, because other layers of the tokens may follow. The
        caller advances them after the last part, so that an interrupt between two parts leaves no
        token half computed.

        Args:
            cache: a cache of the whole model. Keys and values of the other layers stay as they are.
            tokens: ``[tokens]`` token ids, segment after segment.
            segments: ordered by cache slot.
            logit_rows: indices of the packed tokens whose logits are returned; ``None`` for none.
            entering: ``[tokens, hidden]`` residual stream before the first of the layers; ``None``
                to embed the tokens.
            leaves: whether the stream after the last of the layers is returned.
        """
        if self.native is not None:
            return PartOutput(
                *self.native.run(cache, tokens, segments, logit_rows, entering, leaves)
            )
        logits, stream = self._model.forward_part(
            cache, tokens, segments, logit_rows, self.layers, entering, self.adapter
        )
        return PartOutput(logits, stream if leaves else None)
