"""Keys and values of prefixes that several requests share, outside the cache slots.

Tokens are stored in blocks of a fixed size. A block is found by its own tokens and all tokens
before it. A request's cache slot stays contiguous, as the attention kernels expect: stored blocks
are copied into it, which takes a small fraction of the time of computing them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from draftwise.models.kv_cache import KVCache

# Tokens of a block. It divides the size of every ring.
BLOCK_SIZE = 16

# A block's place in the tree of prefixes: the number of the block before it, and its tokens. The
# first block of a text follows its salt.
_Key = tuple[Hashable, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class _Block:
    """A stored block.

    Attributes:
        number: unique and never used again, so that no successor of a dropped block is found.
        key: its key.
        place: its index in the memory.
    """

    number: int
    key: _Key
    place: int


class PrefixStore:
    """Blocks of keys and values of one model. The least recently used ones are dropped.

    A block is always used more recently than those that follow it. So the least recently used block
    has no successor, and all predecessors of a stored block are stored.

    Attributes:
        cache: the model's cache, from which blocks are copied and to which they return.
        num_blocks: maximum number of blocks.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        """Allocate memory. On a CPU, it becomes resident only when blocks are stored.

        Args:
            cache: the model's cache.
            num_blocks: maximum number of blocks.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self.cache, self.num_blocks = cache, num_blocks
        self._memory = cache.new_blocks(num_blocks, BLOCK_SIZE)
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
        self._chains[cache_slot] = []
        self._seen[cache_slot] = 0

    def num_new_tokens(self, cache_slot: int) -> int:
        """Number of tokens by which a cache slot has grown since it was stored or restored."""
        return self.cache.lengths[cache_slot] - self._seen[cache_slot]

    def find(self, tokens: Sequence[int], salt: str, limit: int) -> int:
        """The length of the longest stored prefix of a text; see :meth:`restore`."""
        return len(self._match(tokens, salt, limit)) * BLOCK_SIZE

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
        length, chain = cache.lengths[cache_slot], self._match(tokens, salt, limit)
        end = len(chain) * BLOCK_SIZE
        if end <= length:
            return length
        self._touch(chain)
        first = length // BLOCK_SIZE
        cache.write_blocks(cache_slot, first, self._memory, [each.place for each in chain[first:]])
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
            cache.read_blocks(cache_slot, known, self._memory, places)
        except BaseException:
            self._free.extend(places)
            raise
        # Only now, as an interrupt above leaves blocks without their contents.
        self._chains[cache_slot] = [*chain, *new]
        self._blocks.update((block.key, block) for block in reversed(new))
        self._touch(self._chains[cache_slot])

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._chains = [[] for _ in self._chains]
        self._seen = [0] * len(self._seen)

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
        return dropped.place
