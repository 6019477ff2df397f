"""The integer inputs of a step's kernels, in one buffer that is uploaded at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import upload
from draftwise.models.packing import PackedBatch
from draftwise.models.ragged import RaggedAttention, RaggedKernels, TokenwiseAttention
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import TreePlaces

# Numbers of each token about its token tree.
_OF_TREES = 3

Numbers = TypeVar("Numbers", NDArray[np.int32], Tensor)


class StepInputs:
    """Input buffer of steps up to a fixed number of tokens and requests.

    The buffer is one int32 vector. It holds four numbers per token: id, position, token slot, and
    first token slot of its request, both in layers without a ring. For token trees, three more are
    before them: the two halves of the ancestors, and the root. The three index vectors of
    ``FusedAttention`` follow. Padding tokens are written to the cache's spare token slot.
    """

    def __init__(
        self, cache: KVCache, num_tokens: int, num_requests: int, has_trees: bool = False
    ) -> None:
        """Allocate the buffer.

        Args:
            cache: the cache that the steps read and write.
            num_tokens: maximum number of tokens in a step.
            num_requests: maximum number of requests in a step.
            has_trees: whether the tokens may be those of token trees.
        """
        self._num_tokens = num_tokens
        self._num_requests = num_requests
        self._spare_token_slot = cache.spare_token_slot
        self._capacity = cache.capacity
        # The numbers about trees are first, where the ancestors are aligned as 64-bit integers.
        self._begin = _OF_TREES * num_tokens if has_trees else 0
        size = self._begin + 4 * num_tokens + 3 * num_requests + 2
        self._buffer = torch.zeros(size, dtype=torch.int32, device=cache.device)

    def fill(
        self,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        trees: NDArray[np.void] | None = None,
    ) -> None:
        """Write the tokens of a step and their places in the cache.

        Args:
            tokens: ``[tokens]`` token ids.
            segments: ordered by cache slot.
            trees: ``[tokens]`` of ``TREE_TOKEN``; ``None`` without token trees.
        """
        cache_slots, starts, counts = np.array(segments, dtype=np.int64).T
        total, size, requests = int(counts.sum()), self._num_tokens, self._num_requests
        ends = counts.cumsum()
        places = np.arange(total) + np.repeat(starts - (ends - counts), counts)
        first_keys = cache_slots * self._capacity
        first_of_token = np.repeat(first_keys, counts)
        host = np.zeros(len(self._buffer), dtype=np.int32)
        of_token, of_request = self._parts(host)
        if trees is not None:
            host[: 2 * size].view(np.uint64)[:total] = trees["ancestors"]
            host[2 * size : 3 * size][:total] = trees["root"]
        if not isinstance(tokens, Tensor):
            of_token[0, :total] = tokens
        of_token[1, :total] = places if trees is None else trees["position"]
        of_token[2:] = self._spare_token_slot
        of_token[2, :total] = first_of_token + places
        of_token[3, :total] = first_of_token
        query_ends, first, num_keys = np.split(of_request, [requests + 1, 2 * requests + 2])
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
            self._buffer[self._begin : self._begin + total].copy_(tokens)

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
        of_token, of_request = self._parts(self._buffer)
        ids, positions, token_slots, first_of_token = of_token.long()
        attention: RaggedAttention
        if kernels.any:
            query_ends, first, num_keys = torch.split(
                of_request, [requests + 1, requests + 1, requests]
            )
            trees = None
            if self._begin:
                ancestors = self._buffer[: 2 * size].view(torch.long)
                trees = TreePlaces(of_token[1], self._buffer[2 * size : 3 * size], ancestors)
            attention = kernels.attention(
                query_ends, first, num_keys, max_queries, self._capacity, trees
            )
        else:
            attention = TokenwiseAttention(first_of_token, positions + 1, self._capacity)
        return ids, PackedBatch(cache, positions, token_slots, [], attention)

    def _parts(self, buffer: Numbers) -> tuple[Numbers, Numbers]:
        """``[4, tokens]`` the numbers of each token, and the index vectors, as views."""
        size, end = self._num_tokens, self._begin + 4 * self._num_tokens
        return buffer[self._begin : end].reshape(4, size), buffer[end:]
