"""Keys, values and states of prefixes that several requests share, outside the cache slots.

Tokens are stored in blocks of a fixed size. A block is found by its own tokens and all tokens
before it. A request's cache slot stays contiguous, as the attention kernels expect: stored blocks
are copied into it, which takes a small fraction of the time of computing them.

The state of a layer with a recurrence is valid at one position only. It is stored with the block
that ends there. Of a text, the longest prefix is restored whose last block has a state. Positions
are before all tokens that may still be rejected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import CacheExhaustedError
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import cache_zeros
from draftwise.models.recurrent.snapshots import Snapshots

# Tokens of a block. It divides the size of every ring.
BLOCK_SIZE = 16

# A block's place in the tree of prefixes: the number of the block before it, and its tokens. The
# first block of a text follows its salt.
_Key = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False)
class _Block:
    """A stored block.

    Attributes:
        number: unique and never used again, so that no successor of a dropped block is found.
        key: its key.
        place: its index in the memory.
        state: index of the states at its end in the memory of states; ``None`` if not stored.
    """

    number: int
    key: _Key
    place: int
    state: int | None = None


class PrefixStore:
    """Blocks of keys and values of one model. The least recently used ones are dropped.

    A block is always used more recently than those that follow it. So the least recently used block
    has no successor, and all predecessors of a stored block are stored.

    Attributes:
        cache: the model's cache, from which blocks are copied and to which they return.
        num_blocks: maximum number of blocks.
    """

    def __init__(self, cache: KVCache, num_blocks: int, num_states: int = 0) -> None:
        """Allocate memory. On a CPU, it becomes resident only when blocks are stored.

        Args:
            cache: the model's cache.
            num_blocks: maximum number of blocks.
            num_states: maximum number of positions whose states are stored, for a cache with
                recurrent states.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self.cache, self.num_blocks = cache, num_blocks
        self._snapshots = None
        if cache.recurrent is not None:
            self._snapshots = Snapshots(cache.recurrent, num_states)
        self._free_states = list(range(num_states - 1, -1, -1))
        # Blocks with states, the least recently stored first.
        self._with_state: OrderedDict[int, _Block] = OrderedDict()
        # Of each cache slot, the newest position whose states were taken, and their index.
        self._newest: dict[int, tuple[int, int]] = {}
        self._memory = CacheBlocks(cache, num_blocks, BLOCK_SIZE)
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._next_number = 0
        # The stored blocks with which each cache slot begins, as far as they were looked up.
        self._chains: list[list[_Block]] = [[] for _ in range(cache.num_cache_slots)]
        # The length of each cache slot when it was stored last.
        self._seen = [0] * cache.num_cache_slots

    def __len__(self) -> int:
        """Number of stored blocks."""
        return len(self._blocks)

    def begin(self, cache_slot: int) -> None:
        """A new request uses a cache slot."""
        self._drop_newest(cache_slot)
        self._chains[cache_slot] = []
        self._seen[cache_slot] = 0

    def num_new_tokens(self, cache_slot: int) -> int:
        """Number of tokens by which a cache slot has grown since it was stored or restored."""
        return self.cache.lengths[cache_slot] - self._seen[cache_slot]

    def find(self, tokens: Sequence[int], salt: str, limit: int) -> int:
        """The length of the longest stored prefix of a text; see :meth:`restore`."""
        return len(self._restorable(tokens, salt, limit)) * BLOCK_SIZE

    def take_states(self, cache_slot: int, length: int) -> None:
        """Take the states at the last end of a block, if the cache slot has just passed it.

        Args:
            cache_slot: the cache slot.
            length: the position is at most this one.
        """
        recurrent = self.cache.recurrent
        if recurrent is None:
            return
        assert self._snapshots is not None
        position = recurrent.position_before(cache_slot, length, BLOCK_SIZE)
        known, state = self._newest.pop(cache_slot, (0, None))
        if position is None or position <= known:
            if state is not None:
                self._newest[cache_slot] = known, state
            return
        state = self._take_state() if state is None else state
        if state is not None:
            self._snapshots.take(state, cache_slot, position)
            self._newest[cache_slot] = position, state

    def restore(self, cache_slot: int, tokens: Sequence[int], salt: str, limit: int) -> int:
        """Copy the longest stored prefix of a text to a cache slot, and set the slot's length.

        Args:
            cache_slot: a cache slot, which contains the first tokens of the text.
            tokens: the text.
            salt: only blocks that were stored with the same salt are found.
            limit: maximum number of tokens of the prefix.

        Returns:
            The number of tokens in the cache slot. It is unchanged if no longer prefix is stored.
        """
        cache = self.cache
        length, chain = cache.lengths[cache_slot], self._restorable(tokens, salt, limit)
        end = len(chain) * BLOCK_SIZE
        if end <= length:
            return length
        self._touch(chain)
        first = length // BLOCK_SIZE
        self._memory.restore(cache_slot, first, [each.place for each in chain[first:]])
        last = chain[-1]
        if self._snapshots is not None and last.state is not None:
            self._snapshots.restore(last.state, cache_slot, end)
            self._with_state.move_to_end(last.number)
        cache.advance(cache_slot, end)
        self._chains[cache_slot], self._seen[cache_slot] = chain, end
        return end

    def store(self, cache_slot: int, tokens: Sequence[int], salt: str) -> None:
        """Store the complete blocks of a cache slot that are not stored yet.

        Args:
            cache_slot: the cache slot.
            tokens: its text, at least as long as the slot's tokens.
            salt: as in :meth:`restore`.
        """
        cache = self.cache
        self._seen[cache_slot] = cache.lengths[cache_slot]
        end = cache.lengths[cache_slot] // BLOCK_SIZE
        chain = self._chains[cache_slot]
        if len(chain) >= end:
            self._attach_newest(cache_slot, chain)
            return
        if chain and self._blocks.get(chain[-1].key) is not chain[-1]:
            chain = []  # dropped meanwhile
        # Another cache slot may have stored the next blocks of the same text.
        chain = self._match(tokens, salt, end * BLOCK_SIZE, chain)
        self._touch(chain)
        known, places = len(chain), []
        try:
            new: list[_Block] = []
            for index in range(known, end):
                if not cache.holds(cache_slot, index * BLOCK_SIZE):
                    break
                place = self._take_place(chain)
                if place is None:
                    break
                places.append(place)
                before = new[-1] if new else chain[-1] if chain else None
                text = tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                key = (salt if before is None else before.number), text
                new.append(_Block(self._next_number, key, place))
                self._next_number += 1
            self._memory.store(cache_slot, known, places)
        except BaseException:
            self._free.extend(places)
            raise
        # Only now, as an interrupt above leaves blocks without their contents.
        self._chains[cache_slot] = [*chain, *new]
        self._blocks.update((block.key, block) for block in reversed(new))
        self._touch(self._chains[cache_slot])
        self._attach_newest(cache_slot, self._chains[cache_slot])

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._chains = [[] for _ in self._chains]
        self._seen = [0] * len(self._seen)
        self._free_states += [
            each.state for each in self._with_state.values() if each.state is not None
        ]
        self._with_state.clear()
        for cache_slot in list(self._newest):
            self._drop_newest(cache_slot)

    def _restorable(self, tokens: Sequence[int], salt: str, limit: int) -> list[_Block]:
        """The longest chain of stored blocks that a cache slot can continue."""
        chain = self._match(tokens, salt, limit)
        while self._snapshots is not None and chain and chain[-1].state is None:
            chain.pop()
        return chain

    def _attach_newest(self, cache_slot: int, chain: Sequence[_Block]) -> None:
        """Keep the states that were taken of a cache slot with the block that ends there."""
        position, state = self._newest.get(cache_slot, (0, None))
        if state is None or position > len(chain) * BLOCK_SIZE:
            return
        del self._newest[cache_slot]
        block = chain[position // BLOCK_SIZE - 1]
        if block.state is not None or self._blocks.get(block.key) is not block:
            self._free_states.append(state)
            return
        block.state = state
        self._with_state[block.number] = block

    def _drop_newest(self, cache_slot: int) -> None:
        if cache_slot in self._newest:
            self._free_states.append(self._newest.pop(cache_slot)[1])

    def _take_state(self) -> int | None:
        """A free place for states, or that of the block whose states were used least recently."""
        if self._free_states:
            return self._free_states.pop()
        if not self._with_state:
            return None
        _, block = self._with_state.popitem(last=False)
        state, block.state = block.state, None
        return state

    def _match(
        self, tokens: Sequence[int], salt: str, limit: int, known: Sequence[_Block] = ()
    ) -> list[_Block]:
        """The longest chain of stored blocks with which a text begins.

        Args:
            tokens: the text.
            salt: as in :meth:`restore`.
            limit: maximum number of tokens of the chain.
            known: its first blocks, if they are known.
        """
        chain = list(known)
        before: Hashable = chain[-1].number if chain else salt
        for start in range(len(chain) * BLOCK_SIZE, limit - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = self._blocks.get((before, tuple(tokens[start : start + BLOCK_SIZE])))
            if block is None:
                break
            chain.append(block)
            before = block.number
        return chain

    def _touch(self, chain: Sequence[_Block]) -> None:
        """Mark blocks as used, each more recently than its successors."""
        for block in reversed(chain):
            self._blocks.move_to_end(block.key)

    def _take_place(self, kept: Sequence[_Block]) -> int | None:
        """A free place, or that of the least recently used block unless that is to be kept."""
        if self._free:
            return self._free.pop()
        if len(self._blocks) <= len(kept):
            return None
        _, dropped = self._blocks.popitem(last=False)
        if dropped.state is not None:
            self._with_state.pop(dropped.number, None)
            self._free_states.append(dropped.state)
            dropped.state = None
        return dropped.place


class CacheBlocks:
    """Keys and values of blocks, which are copied from cache slots and back."""

    def __init__(self, cache: KVCache, num_blocks: int, block_size: int) -> None:
        """Allocate memory.

        Args:
            cache: the cache.
            num_blocks: number of blocks.
            block_size: tokens of a block. It divides the size of every ring.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self._cache, self._block_size = cache, block_size
        try:
            # Of each layer, ``[num_blocks, block_size, heads, size]``.
            self._memory = [
                tuple(
                    cache_zeros(
                        (num_blocks, block_size, layer.num_heads, size), cache.dtype, cache.device
                    )
                    for size in (layer.key_size, layer.value_size)
                )
                for layer in cache.layers
            ]
        except (RuntimeError, MemoryError) as error:
            raise CacheExhaustedError(
                "enable_prefix_caching", f"no memory for {num_blocks} blocks of {block_size} tokens"
            ) from error

    def store(self, cache_slot: int, first: int, places: Sequence[int]) -> None:
        """Copy consecutive blocks of a cache slot to memory.

        Args:
            cache_slot: the cache slot.
            first: number of blocks before the first one.
            places: index of each block in the memory.
        """
        if not places:
            return
        device = self._cache.device
        to = torch.tensor(places, device=device)
        for index, memory in enumerate(self._memory):
            for stored, numbers in zip(memory, self._cache.by_slot(index), strict=True):
                rows = self._in_blocks(numbers[cache_slot])
                at = torch.arange(first, first + len(places), device=device) % len(rows)
                stored.index_copy_(0, to, rows[at])

    def restore(self, cache_slot: int, first: int, places: Sequence[int]) -> None:
        """Copy blocks from memory to consecutive tokens of a cache slot.

        Layers with a ring get only the blocks that the tokens after them attend to. The caller
        advances the cache slot.

        Args:
            cache_slot: the cache slot.
            first: number of blocks before the first one.
            places: index of each block in the memory.
        """
        cache, block_size = self._cache, self._block_size
        end = first + len(places)
        for index, memory in enumerate(self._memory):
            start = first
            if cache.sizes[index] < cache.capacity:
                needed = cache.layers[index].first_visible(end * block_size) // block_size
                if needed > first:
                    start = needed
                    cache.restored_from(cache_slot, needed * block_size)
            chosen = torch.tensor(places[start - first :], device=cache.device, dtype=torch.long)
            for stored, numbers in zip(memory, cache.by_slot(index), strict=True):
                rows = self._in_blocks(numbers[cache_slot])
                at = torch.arange(start, end, device=cache.device) % len(rows)
                rows.index_copy_(0, at, stored[chosen])

    def _in_blocks(self, tokens: Tensor) -> Tensor:
        """``[blocks, block_size, heads, width]``, a view of the whole blocks of a cache slot."""
        size = self._block_size
        return tokens[: len(tokens) // size * size].unflatten(0, (-1, size))  # type: ignore[no-untyped-call, no-any-return]
