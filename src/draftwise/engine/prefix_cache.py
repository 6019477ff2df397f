"""Prefix caching: requests that begin with the same tokens compute them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwise.engine.request import Request
from draftwise.models.kv_cache import KVCache
from draftwise.models.prefix_store import BLOCK_SIZE, PrefixStore

# Output tokens are stored when this many are not stored yet, so that rings still hold them.
_STORE_INTERVAL = 256


@dataclass
class PrefixStats:
    """Counts since the engine was created.

    Attributes:
        num_queried: prompt tokens of all requests that were looked up.
        num_hits: prompt tokens that were found and not computed.
    """

    num_queried: int = 0
    num_hits: int = 0


class PrefixCache:
    """Stores the prefixes of requests for all models of an engine.

    The target, the draft and the companion have a store each. A request begins after the longest
    prefix that the target's store contains. The other models get what their own stores contain of
    it, and read the rest themselves.

    Attributes:
        stats: how much was found.
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        num_blocks: int,
        on_restored: Sequence[Callable[[int], None]] = (),
    ) -> None:
        """Allocate memory.

        Args:
            caches: the key-value caches of all models, the target's first.
            num_blocks: maximum number of blocks of each model.
            on_restored: called with the cache slot after a prefix was restored.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self._stores = [PrefixStore(cache, num_blocks) for cache in caches]
        self._on_restored = on_restored
        self.stats = PrefixStats()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the target's store contains."""
        return len(self._stores[0]) * BLOCK_SIZE

    def admit(self, request: Request) -> None:
        """A request got a cache slot, which is empty."""
        for store in self._stores:
            store.begin(request.cache_slot)

    def restore(self, request: Request) -> None:
        """Restore the longest stored prefix of a request that still reads its prompt.

        The last prompt token is always computed, as its logits are needed. Requests that ask for
        log-probabilities of the prompt compute all of it.
        """
        if request.params.prompt_logprobs is not None:
            return
        slot, salt = request.cache_slot, request.params.cache_salt
        before = self._stores[0].cache.lengths[slot]
        limit = request.num_prompt_tokens - 1
        end = self._stores[0].restore(slot, request.tokens, salt, limit)
        if end > before:
            request.num_cached_tokens += end - before
            self.stats.num_hits += end - before
            for store in self._stores[1:]:
                store.restore(slot, request.tokens, salt, end)
            for notify in self._on_restored:
                notify(slot)
        if not before:
            self.stats.num_queried += request.num_prompt_tokens

    def store(self, request: Request, is_over: bool = False) -> None:
        """Store the complete blocks of a request's tokens after a step.

        Args:
            request: a running request.
            is_over: whether the request leaves its cache slot.
        """
        slot, salt = request.cache_slot, request.params.cache_salt
        for store in self._stores:
            length = store.cache.lengths[slot]
            reads_prompt = length <= request.num_prompt_tokens
            if is_over or reads_prompt or length % _STORE_INTERVAL < BLOCK_SIZE:
                store.store(slot, request.tokens, salt)

    def clear(self) -> None:
        """Drop everything that is stored."""
        for store in self._stores:
            store.clear()
