"""What all drafting heads have in common: they read states of a target and propose its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.models.fast_path import SlowPath
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.packed_model import LazyEmbedding, PackedModel
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import SegmentTree


class DraftHead(PackedModel):
    """A model that reads hidden states of a target.

    Attributes:
        state_layers: the target's states that it reads; see
            :class:`draftwise.models.hidden_states.StateTap`.
        state_size: size of these states side by side.
        target_ids: ``[draft_vocab]`` int64 target ids of the tokens that it proposes, on its
            device; ``None`` if they are all tokens of the target in their order.
    """

    state_size: int

    def __init__(
        self,
        layers: list[LayerShape],
        state_layers: tuple[int, ...],
        target_ids: Tensor,
        target: PackedModel,
        hidden_size: int,
        embedding: Tensor | LazyEmbedding,
        native: NativeDecoder | None = None,
        slow_path: SlowPath | None = None,
    ) -> None:
        """Take over what all heads have.

        Args:
            layers: its keys and values.
            state_layers: the target's states that it reads.
            target_ids: ``[draft_vocab]`` int64 target ids of the tokens that it proposes.
            target: the target.
            hidden_size: size of its residual stream.
            embedding: ``[tokens, size]`` the token embedding, or the rows that it is expanded from.
            native: the native kernels; ``None`` where they do not support the head.
            slow_path: why it does not run on the fast path of its device.
        """
        self.state_layers = state_layers
        self.target_ids = proposed_ids(target_ids, target.vocab_size, embedding.device)
        super().__init__(
            "draft",
            "head",
            layers,
            len(target_ids),
            hidden_size,
            embedding,
            native,
            slow_path=slow_path,
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
        """A head cannot run without states; see ``read`` of its class.

        Raises:
            TypeError: always.
        """
        raise TypeError("a head reads its tokens together with states of the target")

    def target_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits over the target's vocabulary, −∞ for tokens that the head does not propose.

        Args:
            logits: ``[rows, draft_vocab]``.
            vocab_size: the target's number of tokens.
        """
        if self.target_ids is None:
            return logits
        wide = logits.new_full((len(logits), vocab_size), float("-inf"))
        return wide.index_copy_(1, self.target_ids, logits)


def proposed_ids(target_ids: Tensor, vocab_size: int, device: torch.device) -> Tensor | None:
    """The target's ids of the tokens that a head proposes; ``None`` for all tokens in their order.

    Args:
        target_ids: ``[draft_vocab]`` int64.
        vocab_size: the target's number of tokens.
        device: device of the result.
    """
    is_whole = torch.equal(target_ids, torch.arange(vocab_size))
    return None if is_whole else target_ids.to(device)
