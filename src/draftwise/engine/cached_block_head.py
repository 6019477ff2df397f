"""A head that drafts blocks, with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.engine.cached_model import ForwardInput
from draftwise.engine.request import Request
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.segment import Segment
from draftwise.models.transfer import upload


class _Blocks:
    """The blocks of a step, of which one position after the other is drawn.

    Attributes:
        hidden: ``[blocks, positions, hidden]`` the output of the layers.
        logits: ``[blocks, positions, draft_vocab]`` without the head's correction.
        places: index of each cache slot's block.
        state: ``[blocks, …]`` of the correction; ``None`` without one.
        confidence: ``[blocks, positions]`` float32, as far as it was asked for.
        position: the next position.
    """

    def __init__(
        self, hidden: Tensor, logits: Tensor, places: dict[int, int], state: Tensor | None
    ) -> None:
        """Begin before the first position."""
        self.hidden, self.logits, self.places, self.state = hidden, logits, places, state
        self.confidence = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)
        self.position = 0


class CachedBlockHead(CachedDraftHead):
    """Runs a head that drafts blocks, and keeps its cache consistent with the requests.

    Entry i of the cache is computed from the target's state at position i. The rows of a block are
    written behind the entries for the time of one pass, and are no entries.

    Attributes:
        head: the head.
    """

    head: BlockHeadModel

    @property
    def are_independent(self) -> bool:
        """Whether the tokens of a block are independent of each other."""
        return self.head.correction is None

    def __init__(self, model: BlockHeadModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the head.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(model, cache, vocab_size)
        # The cache has room for a block after the longest text.
        self.capacity = cache.capacity - model.block_size
        self._num_wanted = model.num_drafted
        self._blocks: _Blocks | None = None

    def room(self, request: Request) -> int:
        """Maximum number of tokens that it can draft: those of one block, within the context."""
        return min(super().room(request), self.head.num_drafted)

    def expect(self, num_tokens: int) -> None:
        """Prepare the next :meth:`read`, after which at most so many positions are drawn."""
        self._num_wanted = min(num_tokens, self.head.num_drafted)

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Read waiting states, and compute the blocks of the requests that draft, in one pass.

        See :meth:`draftwise.engine.cached_model.CachedModel.read`. The logits are those of the
        first position of each block.
        """
        inputs = sorted(inputs, key=lambda each: each.request.cache_slot)
        self._catch_up(each._replace(num_logits=0) for each in inputs)
        context: list[Segment] = []
        blocks: list[Segment] = []
        anchors: list[int] = []
        for request, end, _, num_logits, _ in inputs:
            slot = request.cache_slot
            start, anchor = self._unread(request, end, 0)
            if start < anchor:
                context.append(Segment(slot, start, anchor - start))
            if num_logits:
                blocks.append(Segment(slot, anchor, self.head.block_size))
                anchors.append(request.tokens[anchor])
        if not context and not blocks:
            return None, 0
        states = self._states_of(context) if context else None
        hidden = self.head.read(self.cache, states, context, anchors, blocks)
        num_tokens = sum(segment.num_tokens for segment in (*context, *blocks))
        if hidden is None:
            return None, num_tokens
        slots = [segment.cache_slot for segment in blocks]
        self._begin(hidden[:, : self._num_wanted], slots)
        before = upload(anchors, torch.long, self.device)
        self.next_confidence(slots, before)
        return self._next_logits(slots, before), num_tokens

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of the next position of the blocks. Nothing is read for them."""
        return self._next_logits(rows, tokens)

    def next_confidence(self, slots: Sequence[int], tokens: Tensor) -> Tensor | None:
        """``[slots]`` the estimated probability that the next token of each draft is accepted.

        Args:
            slots: cache slots.
            tokens: ``[slots]`` int64, the token before.

        Returns:
            ``None`` without a confidence head, and at the end of the blocks.
        """
        blocks, head = self._blocks, self.head.confidence
        if blocks is None or head is None or blocks.position == blocks.hidden.shape[1]:
            return None
        rows, position = self._rows(slots), blocks.position
        found = head(blocks.hidden[rows, position], tokens, position)
        blocks.confidence[rows, position] = found
        return found

    def confidence(self, slots: Sequence[int], num_tokens: int) -> Tensor | None:
        """``[slots, num_tokens]`` what was estimated of the first tokens of each draft."""
        if self._blocks is None or self.head.confidence is None:
            return None
        return self._blocks.confidence[self._rows(slots), :num_tokens]

    def has_static_steps(self, num_tokens: int) -> bool:
        """False: the passes are not recorded."""
        return False

    def _begin(self, hidden: Tensor, slots: Sequence[int]) -> None:
        """Compute the logits of all positions, so that the projection is read once."""
        logits = self.head.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        correction, places = self.head.correction, {slot: at for at, slot in enumerate(slots)}
        state = None if correction is None else correction.first_state(len(slots))
        self._blocks = _Blocks(hidden, logits, places, state)

    def _next_logits(self, slots: Sequence[int], tokens: Tensor) -> Tensor:
        """``[slots, vocab]`` logits of the next position.

        Args:
            slots: cache slots.
            tokens: ``[slots]`` int64, the token before.
        """
        blocks = self._blocks
        assert blocks is not None
        rows = self._rows(slots)
        logits = blocks.logits[rows, blocks.position]
        if self.head.correction is not None:
            assert blocks.state is not None
            hidden, state = blocks.hidden[rows, blocks.position], blocks.state[rows]
            logits, state = self.head.correction(logits, tokens, hidden, state)
            blocks.state[rows] = state
        blocks.position += 1
        return self.fit_vocabulary(logits)

    def _rows(self, slots: Sequence[int]) -> Tensor:
        """``[slots]`` int64, the block of each cache slot."""
        assert self._blocks is not None
        places = self._blocks.places
        return upload([places[slot] for slot in slots], torch.long, self.device)

    def _read_context(self, requests: Sequence[Request], segments: Sequence[Segment]) -> None:
        """See :meth:`CachedDraftHead._read_context`."""
        self.head.read(self.cache, self._states_of(segments), segments)
