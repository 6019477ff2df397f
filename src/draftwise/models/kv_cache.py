"""Key-value cache of one model: one contiguous cache slot per request, rolled back in O(1).

Layers that attend to a window keep their newest tokens in a ring instead of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.errors import CacheExhaustedError
from draftwise.models.layer_shape import LayerShape
from draftwise.models.memory import cache_zeros
from draftwise.models.recurrent.cache import RecurrentCache
from draftwise.models.recurrent.shapes import RecurrentShapes

# The size of a ring is a multiple of this, so that a kernel's block of keys never wraps around.
_RING_BLOCK = 64


class KeptPath(NamedTuple):
    """The accepted path of a token tree.

    Attributes:
        cache_slot: the request's place in the cache.
        root: place of the tree's first token, which is kept.
        offsets: place of each kept token after the root, relative to the root, increasing.
    """

    cache_slot: int
    root: int
    offsets: Sequence[int]


class KVCache:
    """Key-value cache of one model: ``num_cache_slots`` requests of up to ``capacity`` tokens.

    A *cache slot* is the fixed region of one request, reused by a later one. In each layer it
    consists of *token slots*, each for the keys and values of one token. On a CPU, memory becomes
    resident only when tokens are written to it.

    Most layers have ``capacity`` token slots in each cache slot. A layer that attends to a limited
    span of tokens has fewer where that saves memory. Its token slots form a ring: the token at
    position ``p`` is in token slot ``p % size``. The ring holds the span and the new tokens of one
    pass, so that writing new tokens, accepted or not, never overwrites a key that is still needed.

    Attributes:
        layers: shape of each layer.
        num_cache_slots: maximum number of requests in the cache.
        capacity: maximum number of tokens of a request.
        sizes: token slots in each cache slot, by layer.
        max_new_tokens: maximum number of new tokens of one request in one pass.
        lengths: number of valid tokens in each cache slot, ``[num_cache_slots]`` host integers.
        dtype: type of keys and values.
        device: device that holds the cache.
        spare_token_slot: index of a token slot after all cache slots. Padding tokens are written
            there, and it is never read.
        hides_stale: whether attention never reads a cache slot beyond its length, not even under a
            mask.
        bytes_per_token: memory of one token's keys and values over all layers without a ring.
        ring_bytes: memory of all rings, and of all recurrent states.
        recurrent: states of layers with a recurrence; ``None`` without such layers.
        steps: what the model keeps for passes of fixed sizes, which use this cache's memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_cache_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        max_new_tokens: int | None = None,
        recurrent: RecurrentShapes | None = None,
    ) -> None:
        """Allocate memory. Arguments that are not listed are attributes.

        Args:
            max_new_tokens: maximum number of new tokens of one request in one pass; ``None`` for
                no limit, and no rings.
            recurrent: what layers with a recurrence keep of a request; ``None`` without such
                layers.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self.layers = list(layers)
        self.num_cache_slots = num_cache_slots
        self.capacity = capacity
        self.max_new_tokens = capacity if max_new_tokens is None else max_new_tokens
        rings = max_new_tokens is not None
        self.sizes = [self._size(layer) if rings else capacity for layer in layers]
        self._rings = [
            (layer, size) for layer, size in zip(layers, self.sizes, strict=True) if size < capacity
        ]
        self.lengths = [0] * num_cache_slots
        self.dtype, self.device = dtype, device
        self.spare_token_slot = num_cache_slots * capacity
        self.hides_stale = False
        self.steps: object = None
        self._written = [0] * num_cache_slots
        # First position that is valid in the rings, if earlier ones were not written.
        self._first_valid = [0] * num_cache_slots
        self.bytes_per_token = sum(
            layer.token_bytes(dtype)
            for layer, size in zip(layers, self.sizes, strict=True)
            if size == capacity
        )
        self.ring_bytes = num_cache_slots * sum(
            size * layer.token_bytes(dtype) for layer, size in self._rings
        )
        self.recurrent: RecurrentCache | None = None
        try:
            if recurrent:
                self.recurrent = RecurrentCache(recurrent, num_cache_slots, dtype, device)
                self.ring_bytes += num_cache_slots * self.recurrent.bytes_per_slot
            self._slots = [
                tuple(
                    cache_zeros((num_cache_slots * size + 1, s.num_heads, width), dtype, device)
                    for width in (s.key_size, s.value_size)
                )
                for s, size in zip(layers, self.sizes, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            raise CacheExhaustedError(
                "max_model_len",
                f"no memory for a key-value cache of {num_cache_slots} requests x {capacity} "
                "tokens; lower max_model_len or max_batch_size",
            ) from error
        self._layers = [
            tuple(each[:-1].view(num_cache_slots, size, *each.shape[1:]) for each in pair)
            for pair, size in zip(self._slots, self.sizes, strict=True)
        ]

    def sharing(self) -> KVCache:
        """A cache with the same memory and with lengths of its own, which are 0.

        The model that uses it writes to the memory of this cache, beyond this cache's lengths.
        """
        other = copy(self)
        other.lengths, other.steps = [0] * self.num_cache_slots, None
        return other

    def _size(self, layer: LayerShape) -> int:
        if layer.span is None:
            return self.capacity
        size = layer.span + self.max_new_tokens
        return min(self.capacity, -(-size // _RING_BLOCK) * _RING_BLOCK)

    @property
    def has_rings(self) -> bool:
        """Whether any layer keeps its newest tokens only."""
        return bool(self._rings)

    def in_layer(self, layer: int, token_slots: Tensor, positions: Tensor) -> Tensor:
        """Token slots in the memory of a layer, which may be a ring.

        Args:
            layer: layer index.
            token_slots: cache_slot * capacity + position of each token.
            positions: position of each token.
        """
        size = self.sizes[layer]
        if size == self.capacity:
            return token_slots
        return token_slots // self.capacity * size + positions % size

    def write(self, layer: int, token_slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of packed tokens.

        Args:
            layer: layer index.
            token_slots: ``[tokens]`` int64, cache_slot * size + position % size, with the size of
                the layer.
            keys: ``[tokens, heads, key_size]``.
            values: ``[tokens, heads, value_size]``.
        """
        k, v = self._slots[layer]
        k.flatten(1).index_copy_(0, token_slots, keys.flatten(1))
        v.flatten(1).index_copy_(0, token_slots, values.flatten(1))

    def token_slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, by token slot, the spare one included.

        Returns:
            Keys ``[token_slots, heads, key_size]`` and values ``[token_slots, heads, value_size]``,
            with ``token_slots = num_cache_slots * size + 1``.
        """
        k, v = self._slots[layer]
        return k, v

    def by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of all keys and values of a layer, ``[cache_slots, size, heads, width]`` each."""
        k, v = self._layers[layer]
        return k, v

    def read(
        self, layer: int, first_cache_slot: int, end_cache_slot: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Views of the first tokens of consecutive cache slots of a layer without a ring.

        Args:
            layer: layer index.
            first_cache_slot: first cache slot.
            end_cache_slot: one past the last cache slot.
            length: tokens to read from each.

        Returns:
            Keys ``[cache_slots, heads, length, key_size]`` and values
            ``[cache_slots, heads, length, value_size]``.
        """
        k, v = self._layers[layer]
        return (
            k[first_cache_slot:end_cache_slot, :length].transpose(1, 2),
            v[first_cache_slot:end_cache_slot, :length].transpose(1, 2),
        )

    def read_span(self, layer: int, cache_slot: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values of consecutive positions of one cache slot, from a ring or not.

        Args:
            layer: layer index.
            cache_slot: the cache slot.
            first: first position.
            end: one past the last position.

        Returns:
            Keys ``[heads, end - first, key_size]`` and values ``[heads, end - first, value_size]``.
        """
        size = self.sizes[layer]
        k, v = (each[cache_slot] for each in self._layers[layer])
        if first // size == (end - 1) // size:
            start = first % size
            return tuple(each[start : start + end - first].transpose(0, 1) for each in (k, v))  # type: ignore[return-value]
        places = torch.arange(first, end, device=self.device) % size
        return k[places].transpose(0, 1), v[places].transpose(0, 1)

    def advance(self, cache_slot: int, length: int) -> None:
        """Set the length of a cache slot after its tokens up to ``length`` were written."""
        self.lengths[cache_slot] = length
        self._written[cache_slot] = max(self._written[cache_slot], length)

    def assume(self, cache_slot: int, length: int) -> None:
        """Prepare a measurement: the first ``length`` tokens of a cache slot count as written."""
        self.lengths[cache_slot] = 0
        if self.recurrent is not None:
            self.recurrent.restored(cache_slot, length)
        self.advance(cache_slot, length)

    def begin_pass(self, segments: Iterable[tuple[int, int, int]]) -> None:
        """Record what a pass is about to write to rings, as an exception may come before its end.

        Args:
            segments: cache slot, start and number of tokens of each request.
        """
        segments = list(segments)
        for cache_slot, start, count in segments:
            self._written[cache_slot] = max(self._written[cache_slot], start + count)
        if self.recurrent is not None:
            self.recurrent.begin_pass(segments)

    def advance_all(self, segments: Iterable[tuple[int, int, int]]) -> None:
        """Set the lengths after all layers of a pass have written its tokens.

        Args:
            segments: cache slot, start and number of tokens of each request.
        """
        for cache_slot, start, count in segments:
            self.advance(cache_slot, start + count)

    def truncate(self, cache_slot: int, length: int) -> None:
        """Drop all tokens of a cache slot from position ``length`` on, in O(1).

        The tokens before it will not be dropped any more.

        Raises:
            ValueError: a ring no longer holds all tokens that the token at ``length`` attends to,
                or a recurrent state is that of a later position.
        """
        if not self.can_truncate(cache_slot, length):
            raise ValueError(
                f"cache slot {cache_slot} cannot be truncated to {length} tokens: "
                f"{self._written[cache_slot]} were written to its rings and states"
            )
        self.lengths[cache_slot] = min(length, self.lengths[cache_slot])
        if self.recurrent is not None:
            self.recurrent.settle(cache_slot, self.lengths[cache_slot])

    def roll_back(self, cache_slot: int, length: int) -> bool:
        """Truncate a cache slot, or clear it where that is not possible.

        Returns:
            Whether the first ``length`` tokens stay.
        """
        stays = self.can_truncate(cache_slot, length)
        if stays:
            self.truncate(cache_slot, length)
        else:
            self.clear(cache_slot)
        return stays

    def can_truncate(self, cache_slot: int, length: int) -> bool:
        """Whether rings hold all that the token at ``length`` attends to, and states reach it."""
        if self.recurrent is not None and not self.recurrent.can_truncate(
            cache_slot, min(length, self.lengths[cache_slot])
        ):
            return False
        return length >= self.lengths[cache_slot] or all(
            layer.first_visible(length) >= self._first_held(cache_slot, size)
            for layer, size in self._rings
        )

    def keep_paths(self, paths: Sequence[KeptPath]) -> None:
        """Keep one path of each token tree: move its tokens together, and drop the other tokens.

        Args:
            paths: the paths, of different cache slots. Each tree ends its cache slot.
        """
        moves = [
            (slot, root + offset, root + place)
            for slot, root, offsets in paths
            for place, offset in enumerate(offsets, 1)
            if offset != place
        ]
        if moves:
            slots, sources, targets = torch.tensor(moves, device=self.device).T
            for size in set(self.sizes):
                source = slots * size + sources % size
                target = slots * size + targets % size
                for (keys, values), own in zip(self._slots, self.sizes, strict=True):
                    if own == size:
                        # The source is copied first, so overlapping moves are right.
                        keys[target] = keys[source]
                        values[target] = values[source]
        for slot, root, offsets in paths:
            self.truncate(slot, root + 1 + len(offsets))

    def clear(self, cache_slot: int) -> None:
        """Empty a cache slot for its next request.

        Written tokens are overwritten with zeros unless :attr:`hides_stale`: a mask hides stale
        numbers, but not stale NaNs.
        """
        written = 0 if self.hides_stale else self._written[cache_slot]
        for keys, values in self._layers if written else ():
            # A slice ends at the layer's size, however many tokens were written.
            keys[cache_slot, :written].zero_()
            values[cache_slot, :written].zero_()
        self.lengths[cache_slot] = self._written[cache_slot] = self._first_valid[cache_slot] = 0
        if self.recurrent is not None:
            self.recurrent.clear(cache_slot)

    def _first_held(self, cache_slot: int, size: int) -> int:
        """The first position that is still in a ring of a size."""
        return max(self._written[cache_slot] - size, self._first_valid[cache_slot])

    def restored_from(self, cache_slot: int, position: int) -> None:
        """Record that the rings of a cache slot have no tokens before a position."""
        self._first_valid[cache_slot] = max(self._first_valid[cache_slot], position)

    def holds(self, cache_slot: int, position: int) -> bool:
        """Whether all layers hold the tokens of a cache slot from a position on."""
        return all(position >= self._first_held(cache_slot, size) for _, size in self._rings)
