"""A draft or companion model with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.engine.lifecycle import Commit
from draftwise.engine.request import Request
from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.models.kv_cache import KVCache
from draftwise.models.packed_model import PackedModel
from draftwise.models.packing import PackedBatch
from draftwise.models.segment import Segment
from draftwise.models.static_steps import StaticSteps
from draftwise.models.tree_tokens import MAX_TREE_TOKENS, SegmentTree, tree_after


class ForwardInput(NamedTuple):
    """The tokens that a model reads for one request.

    Attributes:
        request: the request.
        end: its tokens are read from the end of the cache up to this position.
        drafted: tokens that are read after them.
        num_logits: number of tokens at the end of the input whose logits are returned.
        parents: if the drafted tokens are nodes of a token tree, the index of the parent of each
            among them, -1 for the newest token of the request; ``None`` for a chain.
    """

    request: Request
    end: int
    drafted: Sequence[int] = ()
    num_logits: int = 0
    parents: Sequence[int] | None = None


class PackedInput(NamedTuple):
    """The inputs of one packed pass.

    Attributes:
        tokens: ``[tokens]`` token ids, segment after segment.
        segments: ordered by cache slot.
        logit_rows: indices of the tokens whose logits are wanted.
        states: ``[tokens, size]`` states of the target that a head reads with the tokens; ``None``
            for other models.
        trees: ``[segments]`` the token tree of each segment; ``None`` for one without, and if there
            are none.
    """

    tokens: list[int]
    segments: list[Segment]
    logit_rows: list[int]
    states: Tensor | None = None
    trees: list[SegmentTree | None] | None = None


class NodeInput(NamedTuple):
    """Nodes of one request's token tree that a model reads in one pass.

    Attributes:
        cache_slot: the request's cache slot.
        tokens: ``[nodes]`` ids of the target.
        tree: their places in the tree.
        rows: ``[nodes]`` the row of the pass before from whose distribution each was taken.
    """

    cache_slot: int
    tokens: Sequence[int]
    tree: SegmentTree
    rows: Sequence[int]


class CachedModel:
    """Runs a draft or companion model and keeps its cache consistent with the requests' tokens.

    For each request it reads only tokens that are not in its cache yet. A step may also let it read
    drafted tokens. The step's commit rolls back those that were not accepted.

    Attributes:
        model: the draft or companion model.
        cache: its cache.
        vocab_size: width of the logits that it returns.
        num_rows: number of cache slots.
        capacity: tokens that fit in one cache slot.
        device: device of the model.
        own_vocab_size: width of the distributions that the native kernels draw from.
        carried_size: size of what is carried from a drafted token to the next one in
            place of states; 0 for models that read tokens only.
        state_layers: the target's hidden states that it reads; empty for models that read tokens
            only.
    """

    def __init__(self, model: PackedModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the draft or companion model.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size. Logits are truncated or padded to this width.
        """
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.num_rows = cache.num_cache_slots
        self.capacity = cache.capacity
        self.device = model.device
        self.own_vocab_size, self.carried_size = vocab_size, 0
        self.state_layers: tuple[int, ...] = ()
        # Number of valid tokens in each slot after the last commit.
        self._committed = [0] * cache.num_cache_slots

    @property
    def native(self) -> NativeDecoder | None:
        """The kernels with which the native backend drafts; ``None`` if they cannot draft."""
        return self.model.native

    def text(self, request: Request) -> Sequence[int]:
        """The request's prompt and output, in the tokens that this model reads."""
        return request.tokens

    def text_end(self, request: Request, end: int) -> int:
        """The position in :meth:`text` up to which the request's first ``end`` tokens reach."""
        return end

    def room(self, request: Request) -> int:
        """Maximum number of tokens that fit in the request's cache slot after its text."""
        return self.capacity - len(request.tokens)

    def num_behind(self, request: Request) -> int:
        """Number of a request's tokens that are not in the cache yet, besides the newest."""
        return max(0, len(request.tokens) - 1 - self.cache.lengths[request.cache_slot])

    def is_overdue(self, request: Request) -> bool:
        """Whether it has to read a request's new tokens although it does not draft for it."""
        return False

    def prefix_text(self, request: Request) -> Sequence[int]:
        """The tokens that the entries of the request's cache slot stand for."""
        return self.text(request)

    def prefix_salt(self, request: Request) -> str:
        """What these entries depend on besides the tokens before them."""
        return request.params.cache_salt

    def prefix_end(self, request: Request, end: int) -> int:
        """The number of entries that the request's first ``end`` tokens have, within its prompt."""
        return self.text_end(request, end)

    def num_scored(self, request: Request, drafted: Sequence[int]) -> int:
        """Number of leading drafted tokens whose logits this model can compute.

        The last of them is not read, as its logits are those after the token before it.
        """
        return max(0, min(len(drafted), self.room(request) + 1))

    def num_own_tokens(self, drafted: Sequence[int]) -> int:
        """Number of tokens that this model reads for drafted tokens of the target."""
        return len(drafted)

    def admit(self, request: Request) -> None:
        """Clear the request's cache slot."""
        self.cache.clear(request.cache_slot)
        self._committed[request.cache_slot] = 0

    def restored(self, cache_slot: int) -> None:
        """A prefix was copied to a cache slot."""
        self._committed[cache_slot] = self.cache.lengths[cache_slot]

    def commit(self, commit: Commit) -> None:
        """Roll back the tokens that were read and not accepted.

        The newest token of a request has not been read yet. After the tokens that the draft itself
        proposed, the model may have read other tokens than the target.
        """
        for request, start, num_drafted in zip(
            commit.requests, commit.starts, commit.num_drafted, strict=True
        ):
            slot = request.cache_slot
            if len(request.tokens) > start:
                self._roll_back(slot, min(len(request.tokens) - 1, start + num_drafted))
            self._committed[slot] = self.cache.lengths[slot]

    def recover(self, requests: Iterable[Request]) -> None:
        """Roll back to the last commit."""
        for request in requests:
            slot = request.cache_slot
            self._roll_back(slot, min(len(request.tokens) - 1, self._committed[slot]))

    def _roll_back(self, cache_slot: int, length: int) -> bool:
        """Drop the tokens of a cache slot from a position on. Returns whether those before it stay.

        A model that caught up in several passes may have written over tokens that it would need
        there. It then reads the whole text again.
        """
        stays = self.cache.roll_back(cache_slot, length)
        self._committed[cache_slot] = self.cache.lengths[cache_slot]
        return stays

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Process new tokens in one packed forward pass.

        Returns:
            ``[sum of num_logits, vocab]`` logits in order of cache slot (``None`` if no logits were
            requested), and the number of tokens processed.
        """
        tokens, segments, rows, _, trees = self.gather(inputs)
        if not segments:
            return None, 0
        logits = self.model.forward(self.cache, tokens, segments, rows or None, trees=trees)
        return None if logits is None else self.fit_vocabulary(logits), len(tokens)

    def gather(self, inputs: Iterable[ForwardInput]) -> PackedInput:
        """Packed tokens, their segments in order of cache slot, and the rows that give logits.

        A model that is further behind than one pass may read catches up first.
        """
        inputs = list(inputs)
        self._catch_up(inputs)
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        trees: list[SegmentTree | None] = []
        for request, end, drafted, num_logits, parents in sorted(
            inputs, key=lambda r: r.request.cache_slot
        ):
            start = self.cache.lengths[request.cache_slot]
            text = request.tokens[start : min(end, self.capacity)]
            new = [*text, *drafted]
            if new:
                tokens.extend(self._readable(new))
                segments.append(Segment(request.cache_slot, start, len(new)))
                trees.append(None if parents is None else tree_after(start, len(text), parents))
            rows.extend(range(len(tokens) - num_logits, len(tokens)))
        return PackedInput(
            tokens, segments, rows, trees=trees if any(tree is not None for tree in trees) else None
        )

    def _catch_up(self, inputs: Iterable[ForwardInput]) -> None:
        """Read tokens without logits until each request's new tokens fit in one pass."""
        cache = self.cache
        most = cache.max_new_tokens if cache.has_rings else self.capacity
        while cache.has_rings or any(each.parents is not None for each in inputs):
            tokens: list[int] = []
            segments: list[Segment] = []
            for request, end, drafted, num_logits, parents in sorted(
                inputs, key=lambda r: r.request.cache_slot
            ):
                start = cache.lengths[request.cache_slot]
                end = min(self.text_end(request, end), self.capacity)
                last = most if parents is None else min(most, MAX_TREE_TOKENS)
                if end - start + self.num_own_tokens(drafted) > last:
                    # The newest token stays for the last pass if its logits are wanted.
                    count = min(end - start - (num_logits > 0), most)
                    tokens.extend(self._readable(self.text(request)[start : start + count]))
                    segments.append(Segment(request.cache_slot, start, count))
            if not segments:
                return
            self.model.forward(cache, tokens, segments, None)

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read one more token per cache slot; returns ``[rows, vocab]`` logits."""
        segments = [Segment(row, self.cache.lengths[row], 1) for row in rows]
        logits = self.model.forward(self.cache, tokens, segments, range(len(rows)))
        assert logits is not None
        return self.fit_vocabulary(logits)

    def read_roots(self, inputs: Iterable[ForwardInput]) -> Tensor:
        """Read new tokens, as :meth:`read` does, before token trees are drafted.

        Returns:
            ``[rows, own vocab]`` logits; see :meth:`target_tokens`.
        """
        logits, _ = self.read(inputs)
        assert logits is not None
        return logits

    def read_nodes(self, inputs: Sequence[NodeInput]) -> Tensor:
        """Read the next nodes of token trees. They may be read once after the pass before.

        Args:
            inputs: in order of cache slot.

        Returns:
            ``[nodes, own vocab]`` logits; see :meth:`target_tokens`.
        """
        tokens, segments, trees, _ = packed_nodes(self.cache, inputs)
        rows = range(len(tokens))
        logits = self.model.forward(self.cache, self._readable(tokens), segments, rows, trees=trees)
        assert logits is not None
        return self.fit_vocabulary(logits)

    def target_tokens(self, tokens: Tensor) -> Tensor:
        """The target's ids of tokens over which :meth:`read_roots` returns logits."""
        return tokens

    def has_static_steps(self, num_tokens: int) -> bool:
        """Whether :meth:`static_steps` supports steps of this many tokens."""
        return self.model.static_steps(self.cache, num_tokens) is not None

    def static_steps(self) -> StaticSteps:
        """The store of the model's steps with fixed sizes."""
        steps = self.model.static_steps(self.cache, 1)
        assert steps is not None
        return steps

    def first_carried(self) -> Tensor | None:
        """``[rows, carried_size]`` what :meth:`read` returned for the next token of each draft.

        ``None`` if nothing is carried from one drafted token to the next one.
        """
        return None

    def read_next(self, ids: Tensor, packed: PackedBatch, carried: Tensor | None) -> Tensor:
        """Logits of a planned pass within a draft that may be recorded.

        Args:
            ids: ``[rows]`` the newest token of each draft.
            packed: plan of the pass.
            carried: ``[rows, carried_size]`` what is carried to this pass, which is overwritten by
                what it carries to the next one; ``None`` for nothing.

        Returns:
            ``[rows, vocab]``.
        """
        return self.fit_vocabulary(self.model.next_logits(ids, packed))

    def _readable(self, tokens: Sequence[int]) -> Sequence[int]:
        """Replace tokens beyond this model's vocabulary by token 0."""
        size = self.model.vocab_size
        if size >= self.vocab_size:
            return tokens
        return [token if token < size else 0 for token in tokens]

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Truncate or pad logits to the target's width. Padding is −∞, so it is never drafted."""
        missing = self.vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


class PackedNodes(NamedTuple):
    """The inputs of one packed pass over nodes of token trees.

    Attributes:
        tokens: ``[nodes]`` ids of the target, segment after segment.
        segments: ordered by cache slot.
        trees: ``[segments]``.
        rows: ``[nodes]`` as in :class:`NodeInput`.
    """

    tokens: list[int]
    segments: list[Segment]
    trees: list[SegmentTree]
    rows: list[int]


def packed_nodes(cache: KVCache, inputs: Sequence[NodeInput]) -> PackedNodes:
    """Pack nodes of token trees, which follow the tokens in the cache."""
    packed = PackedNodes([], [], [], [])
    for slot, tokens, tree, rows in inputs:
        packed.tokens.extend(tokens)
        packed.segments.append(Segment(slot, cache.lengths[slot], len(tokens)))
        packed.trees.append(tree)
        packed.rows.extend(rows)
    return packed
