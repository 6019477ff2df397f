"""The integer inputs of a step's kernels, in one buffer that is uploaded at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.models.attention import PackedBatch, Segment
from draftwise.models.kv_cache import KVCache
from draftwise.models.ragged import RaggedAttention, RaggedKernels, TokenwiseAttention
from draftwise.models.transfer import upload


class StepInputs:
    """Input buffer of steps up to a fixed number of tokens and requests.

    The buffer is one int32 vector. It holds four numbers per token: id, position, token slot, and
    first token slot of its request, both in layers without a ring. The three index vectors of
    ``FusedAttention`` follow. Padding tokens are written to the cache's spare token slot.
    """

    def __init__(self, cache: KVCache, num_tokens: int, num_requests: int) -> None:
        """Allocate the buffer.

        Args:
            cache: the cache that the steps read and write.
            num_tokens: maximum number of tokens in a step.
            num_requests: maximum number of requests in a step.
        """
        self._num_tokens = num_tokens
        self._num_requests = num_requests
        self._spare_token_slot = cache.spare_token_slot
        self._capacity = cache.capacity
        size = 4 * num_tokens + 3 * num_requests + 2
        self._buffer = torch.zeros(size, dtype=torch.int32, device=cache.device)

    def fill(self, tokens: Sequence[int] | Tensor, segments: Sequence[Segment]) -> None:
        """Write the tokens of a step and their places in the cache.

        Args:
            tokens: ``[tokens]`` token ids.
            segments: ordered by cache slot.
        """
        cache_slots, starts, counts = np.array(segments, dtype=np.int64).T
        total, size, requests = int(counts.sum()), self._num_tokens, self._num_requests
        ends = counts.cumsum()
        positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
        first_keys = cache_slots * self._capacity
        first_of_token = np.repeat(first_keys, counts)
        host = np.zeros(len(self._buffer), dtype=np.int32)
        of_token = host[: 4 * size].reshape(4, size)
        if not isinstance(tokens, Tensor):
            of_token[0, :total] = tokens
        of_token[1, :total] = positions
        of_token[2:] = self._spare_token_slot
        of_token[2, :total] = first_of_token + positions
        of_token[3, :total] = first_of_token
        query_ends, first, num_keys = np.split(host[4 * size :], [requests + 1, 2 * requests + 2])
        count = len(cache_slots)
        # Padding requests have no queries. Where every request has one token, they have one too.
        query_ends[1:] = total if total != count else np.arange(1, requests + 1)
        query_ends[1 : count + 1] = ends
        first[:] = self._spare_token_slot
        first[:count] = first_keys
        num_keys[:] = 1
        num_keys[:count] = starts + counts
        device = self._buffer.device
        self._buffer.copy_(upload(torch.from_numpy(host), torch.int32, device), non_blocking=True)
        if isinstance(tokens, Tensor):
            self._buffer[:total].copy_(tokens)

    def plan(
        self, cache: KVCache, kernels: RaggedKernels, max_queries: int
    ) -> tuple[Tensor, PackedBatch]:
        """Plan a forward pass that reads this buffer.

        Args:
            cache: the cache that the buffer was allocated for.
            kernels: available attention kernels.
            max_queries: upper bound of the tokens of one request.

        Returns:
            Token ids ``[num_tokens]`` int64, and the plan.
        """
        size, requests = self._num_tokens, self._num_requests
        ids, positions, token_slots, first_of_token = self._buffer[: 4 * size].view(4, size).long()
        attention: RaggedAttention
        if kernels.any:
            query_ends, first, num_keys = torch.split(
                self._buffer[4 * size :], [requests + 1, requests + 1, requests]
            )
            attention = kernels.attention(query_ends, first, num_keys, max_queries, self._capacity)
        else:
            attention = TokenwiseAttention(first_of_token, positions + 1, self._capacity)
        return ids, PackedBatch(cache, positions, token_slots, [], attention)
