"""An early exit of the target."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.model_part import ModelPart, PartOutput
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import SegmentTree


class ExitModel(PackedModel):
    """The first layers of a target, with its final norm and head.

    It has no weights of its own but those of an adapter, if it has one. Its keys and values are
    those of the target's first layers.

    Attributes:
        target: the target.
        num_layers: number of layers.
    """

    def __init__(
        self,
        target: PackedModel,
        num_layers: int,
        role: str,
        adapter: ExitAdapter | None = None,
    ) -> None:
        """Share the weights of a target.

        Args:
            target: the target.
            num_layers: number of layers, fewer than the target has.
            role: ``"draft"`` or ``"companion"``.
            adapter: maps the stream for the logits; ``None`` for none.
        """
        self.target, self.num_layers = target, num_layers
        self._part = ModelPart(target, 0, num_layers, adapter)
        # No slow path: whatever slows the exit down slows the target down, which says so.
        super().__init__(
            role,
            target.family,
            target.layers[:num_layers],
            target.vocab_size,
            target.hidden_size,
            target.embedding,
            self._part.native,
        )

    def forward(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        logit_rows: Sequence[int] | None,
        tap: StateTap | None = None,
        trees: Sequence[SegmentTree | None] | None = None,
    ) -> Tensor | None:
        """Compute packed tokens; see :meth:`PackedModel.forward`. A tap is not filled.

        Raises:
            ValueError: there are token trees.
        """
        if trees is not None:
            raise ValueError("an exit computes no token trees")
        logits = self._part.forward(cache, tokens, segments, logit_rows or None).logits
        cache.advance_all(segments)
        return logits

    def leave(
        self, cache: KVCache, tokens: Sequence[int] | Tensor, segments: Sequence[Segment]
    ) -> PartOutput:
        """The logits and the residual stream of all packed tokens. Advances the cache's lengths."""
        output = self._part.forward(cache, tokens, segments, range(len(tokens)), leaves=True)
        cache.advance_all(segments)
        return output

    def continued(self, first: int) -> ModelPart:
        """The layers from one of them on, with the exit's logits."""
        if first == 0:
            return self._part
        return ModelPart(self.target, first, self.num_layers, self._part.adapter)
