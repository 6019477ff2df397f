"""Prefix caching: requests that begin with the same tokens compute them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.engine.cached_model import CachedModel
from draftwise.engine.request import Request
from draftwise.models.kv_cache import KVCache
from draftwise.models.prefix_store import PrefixStore

# Output tokens are stored when there are this many new ones, so that rings still hold them.
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
    it, and read the rest themselves. A head cannot, as it reads the target's states: the prefix is
    at most as long as what its store contains.

    Attributes:
        stats: how much was found.
    """

    def __init__(
        self,
        target: KVCache,
        cached_models: Sequence[CachedModel],
        num_blocks: int,
        num_states: int = 0,
    ) -> None:
        """Allocate memory.

        Args:
            target: the target's key-value cache.
            cached_models: the draft, the companion and other models with caches of their own.
            num_blocks: maximum number of blocks of each model.
            num_states: maximum number of positions of which recurrent states are stored, for each
                model that has some.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self._target = PrefixStore(target, num_blocks, num_states)
        self._others = [
            (model, PrefixStore(model.cache, num_blocks, num_states)) for model in cached_models
        ]
        self.stats = PrefixStats()

    def admit(self, request: Request) -> None:
        """A request got a cache slot, which is empty."""
        for store in self._all_stores():
            store.begin(request.cache_slot)

    def restore(self, request: Request) -> None:
        """Restore the longest stored prefix of a request that still reads its prompt.

        The last prompt token is always computed, as its logits are needed. Requests that ask for
        log-probabilities of the prompt compute all of it.
        """
        if request.params.prompt_logprobs is not None:
            return
        slot, salt = request.cache_slot, request.params.cache_salt
        before = self._target.cache.lengths[slot]
        limit = request.num_prompt_tokens - 1
        for model, store in self._others:
            if model.state_layers:
                text, own_salt = model.prefix_text(request), model.prefix_salt(request)
                limit = store.find(text, own_salt, model.prefix_end(request, limit))
        end = self._target.restore(slot, request.tokens, salt, limit)
        if end > before:
            request.num_cached_tokens += end - before
            self.stats.num_hits += end - before
            for model, store in self._others:
                store.restore(
                    slot,
                    model.prefix_text(request),
                    model.prefix_salt(request),
                    model.prefix_end(request, end),
                )
                model.restored(slot)
        if not before:
            self.stats.num_queried += request.num_prompt_tokens

    def store(self, request: Request, is_over: bool = False) -> None:
        """Store the complete blocks of a request's tokens after a step.

        Args:
            request: a running request.
            is_over: whether the request leaves its cache slot.
        """
        slot = request.cache_slot
        for store in self._all_stores():
            self._take_states(store, request)
        if self._stores_now(self._target, request, is_over):
            self._target.store(slot, request.tokens, request.params.cache_salt)
        for model, store in self._others:
            if self._stores_now(store, request, is_over):
                store.store(slot, model.prefix_text(request), model.prefix_salt(request))

    @staticmethod
    def _take_states(store: PrefixStore, request: Request) -> None:
        """Take the states of a request at the last end of a block that it has passed.

        The last token of a prompt is always computed, so a prompt's states end before it.
        """
        length = store.cache.lengths[request.cache_slot]
        before_last = request.num_prompt_tokens - 1
        if before_last < length <= request.num_prompt_tokens:
            length = before_last
        store.take_states(request.cache_slot, length)

    def _stores_now(self, store: PrefixStore, request: Request, is_over: bool) -> bool:
        slot = request.cache_slot
        reads_prompt = store.cache.lengths[slot] <= request.num_prompt_tokens
        return is_over or reads_prompt or store.num_new_tokens(slot) >= _STORE_INTERVAL

    def _all_stores(self) -> list[PrefixStore]:
        return [self._target, *(store for _, store in self._others)]
