"""The target's own scores of a draft, computed before verification and not timed: for studies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory, probabilities, soft_probabilities
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.core.types import CompanionScores, Draft
from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import CachedModel, ForwardInput
from draftwise.engine.request import Request
from draftwise.policies.inputs import DraftPosition


class TargetOracle:
    """Runs the target in a second cache while the draft is written.

    Attributes:
        seconds: total time that it took.
    """

    def __init__(self, cached_model: CachedModel) -> None:
        self._cached_model = cached_model
        self.admit = cached_model.admit
        self.commit = cached_model.commit
        self.recover = cached_model.recover
        self._logits: Tensor | None = None
        self._seen: list[tuple[list[int], Tensor]] = []
        self._seconds_of_drafting = 0.0
        self.seconds = 0.0

    def retire(self, request: Request) -> None:
        """The cache slot is cleared when it is given to the next request."""

    def begin(self, batch: Batch, active: Sequence[int]) -> None:
        """Start a step: read prompt chunks and the new tokens of the requests that draft."""
        with self._off_the_clock():
            inputs = [ForwardInput(chunk.request, chunk.end) for chunk in batch.chunks]
            for index in active:
                request = batch.generating[index]
                inputs.append(ForwardInput(request, len(request.tokens), num_logits=1))
            self._logits = self._cached_model.read(inputs)[0]
            self._seen = []

    def score(
        self, position: DraftPosition, controls: LogitControls, token_history: TokenHistory | None
    ) -> DraftPosition:
        """Add the acceptance probability of the token just drafted."""
        assert self._logits is not None
        assert position.draft_probs is not None
        with self._off_the_clock():
            p = probabilities(self._logits, controls, token_history)
            # Drafts that were drawn in a row are judged on the host.
            p_drawn = token_probabilities(p, position.tokens.to(p.device))
            p_drawn = p_drawn.to(position.tokens.device)
            q_drawn = token_probabilities(position.draft_probs, position.tokens)
            # At temperature 0, p is one-hot: the result is 1 for the target's token and 0 for
            # others.
            known = agreement(q_drawn, p_drawn)
            self._seen.append(
                (list(position.requests), soft_probabilities(self._logits, controls, token_history))
            )
        return position.with_agreement(known)

    def follow(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Read the drafted tokens of the requests that continue drafting.

        Args:
            slots: ``[active]`` cache slots of the requests.
            tokens: ``[active]`` int64.
        """
        with self._off_the_clock():
            self._logits = self._cached_model.read_one(slots, tokens)

    def scores(self, draft: Draft) -> CompanionScores:
        """The scores of the whole draft."""
        assert draft.signals is not None
        with self._off_the_clock(drafting=False):
            p = torch.zeros_like(draft.signals.draft_probs)
            for place, (requests, distributions) in enumerate(self._seen):
                p[torch.tensor(requests, device=p.device), place] = distributions
            p_drawn = token_probabilities(p, draft.tokens)
            return CompanionScores(
                p,
                overlap(draft.signals.draft_probs, p),
                agreement(draft.signals.token_probs, p_drawn),
            )

    def take_seconds_of_drafting(self) -> float:
        """Seconds that it took during drafting since the last call."""
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
