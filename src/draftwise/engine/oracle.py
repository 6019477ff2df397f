"""What the target would do with a draft, found out beforehand and off the clock: for studies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory, beliefs, probabilities
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.core.types import Draft, Judgement
from draftwise.engine.batch import Batch
from draftwise.engine.follower import Follower, Reading
from draftwise.policies.base import DraftPosition


class TargetOracle:
    """The target itself, in a cache of its own, reading along as the draft is written.

    Attributes:
        seconds: time that it took in all.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._logits: Tensor | None = None
        self._seen: list[tuple[list[int], Tensor]] = []
        self._seconds_of_drafting = 0.0
        self.seconds = 0.0

    def begin(self, batch: Batch, active: Sequence[int]) -> None:
        """Start with a step: read prompts, and what the requests that draft have said."""
        with self._off_the_clock():
            readings = [Reading(chunk.request, chunk.end) for chunk in batch.chunks]
            for index in active:
                request = batch.generating[index]
                readings.append(Reading(request, len(request.tokens), num_logits=1))
            self._logits = self._follower.read(readings)[0]
            self._seen = []

    def judge(
        self, position: DraftPosition, controls: LogitControls, history: TokenHistory | None
    ) -> DraftPosition:
        """Add the acceptance probability of the token just drafted."""
        assert self._logits is not None
        assert position.beliefs is not None
        with self._off_the_clock():
            p = probabilities(self._logits, controls, history)
            p_drawn = token_probabilities(p, position.tokens)
            q_drawn = token_probabilities(position.beliefs, position.tokens)
            # At temperature 0 p is one-hot: 1 if it is the target's token, else 0.
            known = agreement(q_drawn, p_drawn)
            self._seen.append((list(position.requests), beliefs(self._logits, controls, history)))
        return position.judged(known)

    def follow(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Read the drafted tokens of the requests that draft on."""
        with self._off_the_clock():
            self._logits = self._follower.read_one(rows, tokens)

    def judgement(self, draft: Draft) -> Judgement:
        """All that it knows of the draft."""
        assert draft.signals is not None
        with self._off_the_clock(drafting=False):
            p = torch.zeros_like(draft.signals.beliefs)
            for place, (requests, distributions) in enumerate(self._seen):
                p[torch.tensor(requests, device=p.device), place] = distributions
            p_drawn = token_probabilities(p, draft.tokens)
            return Judgement(
                p,
                overlap(draft.signals.beliefs, p),
                agreement(draft.signals.token_probs, p_drawn),
            )

    def take_seconds_of_drafting(self) -> float:
        """Time that it took since the last call while the draft was written."""
        seconds, self._seconds_of_drafting = self._seconds_of_drafting, 0.0
        return seconds

    @contextmanager
    def _off_the_clock(self, drafting: bool = True) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds += seconds
        if drafting:
            self._seconds_of_drafting += seconds
