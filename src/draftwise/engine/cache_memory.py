"""How the memory for caches is divided between running requests and stored prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.errors import CacheExhaustedError
from draftwise.models.kv_cache import KVCache
from draftwise.models.prefix_store import BLOCK_SIZE
from draftwise.models.recurrent.snapshots import Snapshots

# Fraction of the memory for the caches that stored prefixes may use.
_PREFIX_SHARE = 0.25
# Maximum number of tokens of stored prefixes per token of running requests.
_MAX_PREFIXES = 4
# Positions of which recurrent states are stored, per running request.
_STATES_PER_REQUEST = 4


class CacheMemory:
    """The division of an engine's memory for caches.

    Attributes:
        num_blocks: blocks of the prefix cache; 0 for none.
        num_states: positions of which the prefix cache stores recurrent states.
        max_cached_tokens: maximum number of cache tokens that are reserved over all requests.
    """

    def __init__(
        self, caches: Sequence[KVCache], cache_bytes: int | None, caches_prefixes: bool
    ) -> None:
        """Divide the memory.

        Args:
            caches: the caches of all models, the target's first.
            cache_bytes: memory for all of them; ``None`` for no limit.
            caches_prefixes: whether there is a prefix cache.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self._caches, self._cache_bytes = caches, cache_bytes
        recurrent = [each.recurrent for each in caches if each.recurrent is not None]
        state_bytes = sum(map(Snapshots.num_bytes, recurrent))
        # What one block of prefix tokens takes in all models, which is 1 without attention.
        layers = [(cache.dtype, layer) for cache in caches for layer in cache.layers]
        block_bytes = max(1, BLOCK_SIZE * sum(layer.token_bytes(dtype) for dtype, layer in layers))
        self.num_states = self._num_prefix_states(state_bytes)
        self.num_blocks = 0
        if caches_prefixes and (self.num_states or not state_bytes):
            self.num_blocks = self._num_prefix_blocks(block_bytes)
        self.max_cached_tokens = self._most_cached_tokens(
            self.num_blocks * block_bytes + self.num_states * state_bytes
        )

    def _num_prefix_blocks(self, block_bytes: int) -> int:
        """They use at most a part of the memory, and leave room for the longest request."""
        target, cache_bytes = self._caches[0], self._cache_bytes
        running = target.num_cache_slots * target.capacity // BLOCK_SIZE
        if cache_bytes is None:
            return int(_PREFIX_SHARE * running)
        longest = target.capacity * sum(cache.bytes_per_token for cache in self._caches)
        left = cache_bytes - longest - sum(cache.ring_bytes for cache in self._caches)
        room = max(0, min(int(_PREFIX_SHARE * cache_bytes), left))
        return min(_MAX_PREFIXES * running, room // block_bytes)

    def _num_prefix_states(self, state_bytes: int) -> int:
        if not state_bytes:
            return 0
        most = _STATES_PER_REQUEST * self._caches[0].num_cache_slots
        if self._cache_bytes is None:
            return most
        return min(most, int(_PREFIX_SHARE * self._cache_bytes) // state_bytes)

    def _most_cached_tokens(self, prefix_bytes: int) -> int:
        target, cache_bytes = self._caches[0], self._cache_bytes
        whole = target.num_cache_slots * target.capacity
        if cache_bytes is None:
            return whole
        rings = sum(cache.ring_bytes for cache in self._caches)
        rest = cache_bytes - rings - prefix_bytes
        per_token = sum(cache.bytes_per_token for cache in self._caches)
        most = min(whole, max(0, rest) // per_token) if per_token else whole
        if most < 1:
            raise CacheExhaustedError(
                "cache_gib",
                f"holds no token: of {cache_bytes / 2**30:.3g} GiB, sliding windows and recurrent "
                f"states take {rings / 2**30:.3g} GiB at a batch size of {target.num_cache_slots}; "
                "give more, or reduce max_batch_size",
            )
        return most
