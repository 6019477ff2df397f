"""Residual streams that exits have left, and passes of the target that continue from them.

An exit reads tokens with the target's first layers and writes their keys and values to the
target's cache (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710, section 4.3). A later pass needs
the other layers only. A pass over more tokens computes all layers for those that no exit has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from draftwise.models.exits.model import ExitModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.model_part import ModelPart, PartOutput
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment


@dataclass
class _Kept:
    """Streams of consecutive tokens of one request.

    Attributes:
        layer: number of layers that the tokens went through.
        start: position of the first token.
        tokens: the tokens.
        parts: ``[some tokens, hidden]`` streams, in order of the tokens.
    """

    layer: int
    start: int
    tokens: list[int]
    parts: list[Tensor]

    def rows(self, count: int) -> Tensor:
        """``[count, hidden]`` the streams of the first tokens."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        return self.parts[0][:count]


@dataclass
class _Rows:
    """The tokens of a segment during a pass.

    Attributes:
        segment: the segment.
        tokens: its tokens.
        kept: what is kept of its first tokens.
        num_kept: number of these tokens.
        begin: index of the first token that the pass has computed so far. All after it are
            computed too, as the first tokens of a segment are the ones that are kept.
    """

    segment: Segment
    tokens: Sequence[int]
    kept: _Kept | None
    num_kept: int
    begin: int


class KeptStates:
    """The streams that exits have left in a step, by cache slot, until the step's commit.

    What is kept of a token is used only in a pass that reads the same token at the same position.
    So policies and other proposers may drop or replace drafted tokens.
    """

    def __init__(self, target: PackedModel) -> None:
        """Set up."""
        self._target = target
        self.num_layers = len(target.layers)
        self._parts: dict[tuple[int, int, ExitModel | None], ModelPart] = {}
        self._kept: dict[int, _Kept] = {}

    def keep(
        self, cache_slot: int, layer: int, start: int, tokens: Sequence[int], rows: Tensor
    ) -> None:
        """Keep the streams of a request's newest tokens in place of what was kept before.

        Args:
            cache_slot: the request's cache slot.
            layer: number of layers that the tokens went through.
            start: position of the first token.
            tokens: the tokens.
            rows: ``[tokens, hidden]`` their streams. The memory must not change until the commit.
        """
        self._kept[cache_slot] = _Kept(layer, start, list(tokens), [rows])

    def extend(self, cache_slot: int, token: int, row: Tensor) -> None:
        """Add the stream ``[1, hidden]`` of one more token after those that were kept."""
        kept = self._kept[cache_slot]
        kept.tokens.append(token)
        kept.parts.append(row)

    def forget(self, cache_slot: int) -> None:
        """Drop what is kept of a request."""
        self._kept.pop(cache_slot, None)

    def run(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        segments: Sequence[Segment],
        logit_rows: Sequence[int] | None,
        exit: ExitModel | None = None,
    ) -> PartOutput:
        """Compute packed tokens up to an exit or to the end, from where they were left.

        Args:
            cache: a cache with the target's memory. Its lengths are advanced.
            tokens: ``[tokens]`` token ids, segment after segment.
            segments: ordered by cache slot.
            logit_rows: indices of the packed tokens whose logits are returned; ``None`` for none.
            exit: the exit at which the pass ends; ``None`` for a pass to the last layer.

        Returns:
            The logits of the exit or of the target, and the stream of all tokens, ``None``
            after the last layer.
        """
        end = self.num_layers if exit is None else exit.num_layers
        leaves_stream = exit is not None
        rows = self._rows(tokens, segments, end)
        levels = {each.kept.layer for each in rows if each.kept is not None}
        if any(each.num_kept < each.segment.num_tokens for each in rows):
            levels.add(0)
        stream: Tensor | None = None
        output = PartOutput(None, None)
        for level, following in pairwise([*sorted(levels), end]):
            entering = _entering(rows, level, stream)
            new = [each for each in rows if each.begin < each.segment.num_tokens]
            is_last = following == end
            output = self._part(level, following, exit if is_last else None).forward(
                cache,
                [token for each in new for token in each.tokens[each.begin :]],
                [_rest(each) for each in new],
                logit_rows if is_last else None,
                entering,
                not is_last or leaves_stream,
            )
            stream = output.stream
        cache.advance_all(segments)
        return output

    def holds_any(self, segments: Sequence[Segment]) -> bool:
        """Whether anything is kept of the requests of a pass."""
        return any(slot in self._kept for slot, _, _ in segments)

    def _rows(self, tokens: Sequence[int], segments: Sequence[Segment], end: int) -> list[_Rows]:
        """The segments of a pass, each with what is kept of its tokens."""
        found, first = [], 0
        for segment in segments:
            slot, start, count = segment
            own = tokens[first : first + count]
            kept, num_kept = self._kept.get(slot), 0
            if kept is not None and kept.start == start and kept.layer < end:
                for mine, theirs in zip(kept.tokens, own, strict=False):
                    if mine != theirs:
                        break
                    num_kept += 1
            found.append(_Rows(segment, own, kept if num_kept else None, num_kept, count))
            first += count
        return found

    def _part(self, first: int, end: int, exit: ExitModel | None) -> ModelPart:
        """Some layers, with the logits of an exit or of the target."""
        part = self._parts.get((first, end, exit))
        if part is None:
            whole = self._target
            part = ModelPart(whole, first, end) if exit is None else exit.continued(first)
            self._parts[first, end, exit] = part
        return part


def _entering(rows: Sequence[_Rows], level: int, stream: Tensor | None) -> Tensor | None:
    """What enters a level: the stream of the level before, and what was kept at this level.

    Args:
        rows: the segments. Those with tokens that enter here begin earlier afterwards.
        level: number of layers before.
        stream: ``[tokens, hidden]`` of the tokens that the pass has computed so far.

    Returns:
        ``[tokens, hidden]``; ``None`` at level 0, where tokens are embedded.
    """
    pieces: list[Tensor] = []
    at = 0
    for each in rows:
        count = each.segment.num_tokens - each.begin
        if level == 0:
            each.begin = each.num_kept
            continue
        if each.kept is not None and each.kept.layer == level:
            pieces.append(each.kept.rows(each.num_kept))
            each.begin = 0
        if count:
            assert stream is not None
            pieces.append(stream[at : at + count])
            at += count
    return torch.cat(pieces) if pieces else None


def _rest(rows: _Rows) -> Segment:
    """The part of a segment that has been reached."""
    slot, start, count = rows.segment
    return Segment(slot, start + rows.begin, count - rows.begin)
