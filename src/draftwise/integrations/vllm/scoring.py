"""Scoring of drafts by a companion whose keys and values are in vLLM's paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.core.types import Draft
from draftwise.integrations.vllm.paged_cache import (
    ComputedTokens,
    DraftedRequests,
    Integers,
    PackedSpans,
    pack,
    split_into_passes,
)

# Token ids ``[tokens]`` on the device, by row of their request and position in text and draft.
TokensAt = Callable[[Integers, Integers], Tensor]
# One pass: logits ``[m, vocab]`` of the tokens with the indices ``[m]``.
Forward = Callable[[PackedSpans, Tensor, Integers], Tensor]


class DraftScorer:
    """Computes a model's logits of drafts in the steps that need them.

    The model's keys and values are stored in blocks that vLLM allocates to each request. In other
    steps, the model computes nothing. When its logits are needed again, it also reads the tokens
    that it has missed.
    """

    def __init__(self, forward: Forward, block_size: int, max_tokens: int) -> None:
        """Set up with an empty cache.

        Args:
            forward: computes one pass.
            block_size: tokens per block of keys and values.
            max_tokens: maximum number of tokens in a pass.
        """
        self._forward = forward
        self._max_tokens = max_tokens
        self._computed = ComputedTokens(block_size)

    def score(
        self,
        drafted: DraftedRequests,
        tokens_at: TokensAt,
        blocks: Integers,
        running: Collection[str],
    ) -> Tensor:
        """Compute the logits of drafted tokens.

        This takes one pass, or several if there are more than ``max_tokens`` tokens.

        Args:
            drafted: at least one request.
            tokens_at: token ids of texts and drafts.
            blocks: ``[batch, blocks]`` block table of the batch.
            running: ids of all requests of the batch.

        Returns:
            Logits ``[drafted tokens, vocab]`` at each drafted token's position, request by request.
        """
        self._computed.keep_only(running)
        spans = self._computed.missing(drafted, blocks[drafted.rows])
        first_scored = np.zeros(len(blocks), dtype=np.int64)
        first_scored[drafted.rows] = drafted.text_lengths - 1
        logits = []
        for part in split_into_passes(spans, self._max_tokens):
            packed = pack(part)
            tokens = tokens_at(packed.owners, packed.positions)
            logit_indices = np.flatnonzero(packed.positions >= first_scored[packed.owners])
            logits.append(self._forward(packed, tokens, logit_indices))
        self._computed.record(drafted.names, drafted.text_lengths, blocks[drafted.rows])
        return torch.cat(logits)


def drafted_requests(draft: Draft, names: Sequence[str], text_lengths: Integers) -> DraftedRequests:
    """The requests of a batch that have a draft.

    Args:
        draft: the draft of the batch.
        names: ids of its requests.
        text_lengths: ``[batch]`` tokens of each request.
    """
    lengths = np.array(draft.lengths, dtype=np.int64)
    rows = np.flatnonzero(lengths)
    return DraftedRequests(
        [names[row] for row in rows.tolist()], rows, text_lengths[rows], lengths[rows]
    )
