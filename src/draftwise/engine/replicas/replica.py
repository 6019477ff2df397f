"""A draft and perhaps a companion that work on a share of every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft, Judgement
from draftwise.engine.batch import Batch, PromptChunk
from draftwise.engine.drafting import ModelDraft
from draftwise.engine.follower import Follower
from draftwise.engine.judging import Companion
from draftwise.engine.replicas.share import Drafted, DraftShare, JudgeShare, TextChange
from draftwise.engine.replicas.told import Told
from draftwise.engine.request import Request
from draftwise.params import RequestSpeculation, SamplingParams


class Replica:
    """Keeps the texts of its rows as far as it is told, and does what the engine would do."""

    def __init__(self, draft: Follower, companion: Follower | None) -> None:
        """Set up.

        Args:
            draft: with a cache of its own.
            companion: likewise.
        """
        self._draft, self._companion = draft, companion
        self._drafter = ModelDraft(draft, draft.vocab_size)
        self._judge = None if companion is None else Companion(companion, companion.vocab_size)
        self._requests: dict[int, Request] = {}
        self._step: tuple[Batch, Draft] | None = None

    @torch.inference_mode()
    def draft(self, share: DraftShare) -> Drafted:
        """Draft for its share of a step."""
        for change in share.texts:
            self._change(change)
        device = self._draft.device
        batch = Batch(
            chunks=[
                PromptChunk(self._requests[row], start, end) for row, start, end in share.chunks
            ],
            generating=[self._requests[row] for row in share.rows],
            can_draft=[limit > 0 for limit in share.limits],
            controls=_moved(share.controls, device),
            history=share.history,
            uniforms=share.uniforms,
            lenience=[1.0] * len(share.rows),
        )
        policy = Told(share.limits, share.signals, share.rule)
        draft = self._drafter.propose(batch, policy)
        self._step = batch, draft
        rule = share.rule if policy.by_rule else None
        rows = {*share.rows, *(row for row, _, _ in share.chunks)}
        return Drafted(
            draft,
            None if rule is None else rule.notes,
            {row: self._draft.cache.lengths[row] for row in rows},
        )

    @torch.inference_mode()
    def judge(self, share: JudgeShare) -> tuple[Judgement | None, dict[int, int]]:
        """What the companion thinks of the last draft, and the lengths of its cache by row."""
        assert self._judge is not None
        assert self._companion is not None
        assert self._step is not None
        batch, draft = self._step
        judgement = None
        if any(share.lengths):
            judgement = self._judge.judge(batch, cut(draft, share.lengths))
        else:
            self._judge.read_prompts(batch)
        requests = [*batch.generating, *(chunk.request for chunk in batch.chunks)]
        lengths = self._companion.cache.lengths
        return judgement, {request.row: lengths[request.row] for request in requests}

    def _change(self, change: TextChange) -> None:
        caches = [(self._draft, change.draft_length)]
        if self._companion is not None:
            caches.append((self._companion, change.companion_length))
        if change.is_new:
            self._requests[change.row] = _text(change.row)
            for follower, _ in caches:
                follower.cache.clear(change.row)
        for follower, length in caches:
            follower.cache.truncate(change.row, length)
        tokens = self._requests[change.row].tokens
        del tokens[change.kept :]
        tokens.extend(change.tail)


def cut(draft: Draft, lengths: tuple[int, ...]) -> Draft:
    """A draft with nothing behind some lengths, in the same memory."""
    for index, (length, old) in enumerate(zip(lengths, draft.lengths, strict=True)):
        if length == old:
            continue
        draft.tokens[index, length:] = 0
        if draft.probs is not None:
            draft.probs[index, length:] = 0.0
        if draft.signals is not None:
            for values in vars(draft.signals).values():
                values[index, length:] = 0.0
    return replace(draft, lengths=lengths)


def _moved(controls: LogitControls, device: torch.device) -> LogitControls:
    moved: dict[str, Any] = {
        name: value.to(device)
        for name, value in vars(controls).items()
        if isinstance(value, Tensor)
    }
    return replace(controls, **moved)


def _text(row: int) -> Request:
    """A request that is only its text; how far it may go is decided elsewhere."""
    params = SamplingParams(max_tokens=2**31)
    request = Request(row, None, [], params, None, frozenset(), 2**31, RequestSpeculation())
    request.row = row
    return request
