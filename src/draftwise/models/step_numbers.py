"""What a step's kernels need to know, as one row of numbers that is uploaded at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.models.attention import PackedBatch, Segment
from draftwise.models.kv_cache import KVCache
from draftwise.models.ragged import RaggedAttention, RaggedKernels, TokenwiseAttention
from draftwise.models.transfer import upload


class StepNumbers:
    """Memory for the numbers of steps of up to so many tokens and requests.

    One row of int32: per token its id, position, slot and the first slot of its row; then the
    three rows of ``FlashAttention``. Tokens that only fill up are written to the spare slot.
    """

    def __init__(self, cache: KVCache, num_tokens: int, num_requests: int) -> None:
        """Set up.

        Args:
            cache: where keys and values are kept.
            num_tokens: most tokens of a step.
            num_requests: most requests of a step.
        """
        self._num_tokens = num_tokens
        self._num_requests = num_requests
        self._spare_slot = cache.spare_slot
        self._capacity = cache.capacity
        size = 4 * num_tokens + 3 * num_requests + 2
        self._numbers = torch.zeros(size, dtype=torch.int32, device=cache.device)

    def fill(self, tokens: Sequence[int] | Tensor, segments: Sequence[Segment]) -> None:
        """Write the tokens of a step and where they belong.

        Args:
            tokens: ``[tokens]``.
            segments: ordered by row.
        """
        rows, starts, counts = np.array(segments, dtype=np.int64).T
        total, size, requests = int(counts.sum()), self._num_tokens, self._num_requests
        ends = counts.cumsum()
        positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
        first_keys = rows * self._capacity
        first_of_token = np.repeat(first_keys, counts)
        host = np.zeros(len(self._numbers), dtype=np.int32)
        of_token = host[: 4 * size].reshape(4, size)
        if not isinstance(tokens, Tensor):
            of_token[0, :total] = tokens
        of_token[1, :total] = positions
        of_token[2:] = self._spare_slot
        of_token[2, :total] = first_of_token + positions
        of_token[3, :total] = first_of_token
        query_ends, first, num_keys = np.split(host[4 * size :], [requests + 1, 2 * requests + 2])
        count = len(rows)
        # Requests that are not there have no queries, unless what fills up is one token for each.
        query_ends[1:] = total if total != count else np.arange(1, requests + 1)
        query_ends[1 : count + 1] = ends
        first[:] = self._spare_slot
        first[:count] = first_keys
        num_keys[:] = 1
        num_keys[:count] = starts + counts
        device = self._numbers.device
        self._numbers.copy_(upload(torch.from_numpy(host), torch.int32, device), non_blocking=True)
        if isinstance(tokens, Tensor):
            self._numbers[:total].copy_(tokens)

    def plan(
        self, cache: KVCache, kernels: RaggedKernels, max_queries: int
    ) -> tuple[Tensor, PackedBatch]:
        """Token ids ``[num_tokens]`` int64 and the plan of a pass that reads these numbers.

        Args:
            cache: the one this was set up for.
            kernels: to attend with, if there are any.
            max_queries: at least the most tokens of one request.
        """
        size, requests = self._num_tokens, self._num_requests
        ids, positions, slots, first_of_token = self._numbers[: 4 * size].view(4, size).long()
        attention: RaggedAttention
        if kernels.any:
            query_ends, first, num_keys = torch.split(
                self._numbers[4 * size :], [requests + 1, requests + 1, requests]
            )
            attention = kernels.attention(query_ends, first, num_keys, max_queries, self._capacity)
        else:
            attention = TokenwiseAttention(first_of_token, positions + 1, self._capacity)
        return ids, PackedBatch(cache, positions, slots, [], attention)
