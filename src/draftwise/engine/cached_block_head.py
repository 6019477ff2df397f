"""A head that drafts blocks, with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwise.engine.cached_model import ForwardInput
from draftwise.engine.one_pass_head import OnePassHead, Predicted
from draftwise.engine.request import Request
from draftwise.models.heads.block_forward import BlockOutput
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import upload
from draftwise.models.segment import Segment


class _Blocks(Predicted):
    """The blocks of a step.

    Attributes:
        num_positions: positions of each block.
        hidden: ``[blocks * positions, hidden]`` the output of the layers.
        state: ``[blocks, …]`` of the correction.
        confidence: ``[blocks * positions]`` float32, as far as it was asked for.
    """

    def __init__(
        self, output: BlockOutput, slots: Sequence[int], anchors: Tensor, state: Tensor
    ) -> None:
        """Begin before the first position."""
        self.num_positions = output.hidden.shape[1]
        first_rows = {slot: at * self.num_positions for at, slot in enumerate(slots)}
        super().__init__(output.logits.flatten(0, 1), first_rows, anchors)
        self.hidden, self.state = output.hidden.flatten(0, 1), state
        self.confidence = self.hidden.new_zeros(len(self.hidden), dtype=torch.float32)


class CachedBlockHead(OnePassHead):
    """Runs a head that drafts blocks, and keeps its cache consistent with the requests.

    Entry i of the cache is computed from the target's state at position i. The rows of a block are
    written behind the entries for the time of one pass, and are no entries.

    Attributes:
        head: the head.
    """

    head: BlockHeadModel
    _predicted: _Blocks | None

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

    @property
    def are_independent(self) -> bool:
        """Whether the tokens of a block are independent of each other."""
        return self.head.correction is None

    @property
    def estimates_confidence(self) -> bool:
        """Whether there is a confidence head."""
        return self.head.confidence is not None

    def room(self, request: Request) -> int:
        """Maximum number of tokens that it can draft: those of one block, within the context."""
        return min(super().room(request), self.head.num_drafted)

    def expect(self, num_tokens: int) -> None:
        """Prepare the next pass, after which at most so many positions are drawn."""
        self._num_wanted = min(num_tokens, self.head.num_drafted)

    def predict(self, inputs: Iterable[ForwardInput]) -> tuple[Predicted | None, int]:
        """Read waiting states, and compute blocks, in one pass; see :class:`OnePassHead`."""
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
        output = self.head.read(self.cache, states, context, anchors, blocks, self._num_wanted)
        num_tokens = sum(segment.num_tokens for segment in (*context, *blocks))
        if output is None:
            return None, num_tokens
        slots, correction = [segment.cache_slot for segment in blocks], self.head.correction
        before = upload(anchors, torch.long, self.device)
        state = before if correction is None else correction.first_state(len(slots))
        self._predicted = _Blocks(output, slots, before, state)
        self.next_confidence(slots, before)
        return self._predicted, num_tokens

    def next_rows(self, slots: Sequence[int], tokens: Tensor) -> Tensor:
        """Go on to the next position of some drafts; see :class:`OnePassHead`."""
        rows, correction = super().next_rows(slots, tokens), self.head.correction
        if correction is not None:
            blocks = self._predicted
            assert blocks is not None
            own = rows // blocks.num_positions
            logits, state = correction(
                blocks.logits[rows], tokens, blocks.hidden[rows], blocks.state[own]
            )
            blocks.logits[rows], blocks.state[own] = logits.to(blocks.logits.dtype), state
        return rows

    def next_confidence(self, slots: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Estimate the acceptance of the next token of each draft; see :class:`OnePassHead`."""
        blocks, head = self._predicted, self.head.confidence
        if blocks is None or head is None or blocks.position == blocks.num_positions:
            return None
        rows = blocks.rows(slots)
        found = head(blocks.hidden[rows], tokens, blocks.position)
        blocks.confidence[rows] = found
        return found

    def confidence(self, slots: Sequence[int], num_tokens: int) -> Tensor | None:
        """``[slots, num_tokens]`` what was estimated of the first tokens of each draft."""
        blocks = self._predicted
        if blocks is None or self.head.confidence is None:
            return None
        firsts = torch.tensor([blocks.first_rows[slot] for slot in slots])
        width = min(num_tokens, blocks.num_positions)
        rows = firsts.unsqueeze(1) + torch.arange(width)
        return blocks.confidence[rows.to(self.device)]

    def _read_context(self, requests: Sequence[Request], segments: Sequence[Segment]) -> None:
        """See :meth:`CachedDraftHead._read_context`."""
        self.head.read(self.cache, self._states_of(segments), segments)
