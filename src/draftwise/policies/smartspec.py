"""SmartSpec: one draft length for the batch, the one with the best estimated goodput."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.core.types import Outcome, StepTimes
from draftwise.policies.base import Policy, PolicyContext, RequestState, Signal
from draftwise.policies.options import integer_option, number_option

# What acceptance is taken to be before anything was seen, and for how many tokens that counts.
_FIRST_GUESS = 0.7
_PRIOR_TOKENS = 4.0


class SmartSpec(Policy):
    """Draft and verify the k in 0 … γ that maximises goodput (Liu et al. 2024, sections 4 and 5).

    With α the acceptance rate, a request is expected to gain (1 − α^{k+1})/(1 − α) tokens from k
    drafted ones, so

        goodput(k) = Σ_b (1 − α^{k_b+1})/(1 − α) / T(k),   k_b = k or what the request has room for,

    where T is k passes of the draft and the target's pass over Σ (k_b + 1) tokens. α is a moving
    average over the batch: accepted tokens against accepted and rejected ones, tokens behind a
    rejection left out. k is chosen before drafting from earlier steps alone: predictable.

    While nothing is drafted nothing is learnt, so every ``explore_every`` such steps one token is
    drafted for the batch. That costs less than 1/``explore_every`` of the time as long as a pass
    with it takes less than twice as long as one without.
    """

    name = "smartspec"
    summary = "one draft length for the whole batch, with the best estimated goodput"
    source = "Liu et al. 2024, Optimizing Speculative Decoding for Serving LLMs Using Goodput"
    signals = frozenset({Signal.HISTORY, Signal.LOAD})
    needs_latency = True

    def __init__(
        self, context: PolicyContext, smoothing: float = 0.95, explore_every: int = 64
    ) -> None:
        """Set up.

        Args:
            context: what every policy gets, a latency model included.
            smoothing: weight of a step in α against the step after it, 0 … 0.9999.
            explore_every: steps without a draft until one token is drafted to learn from.

        Raises:
            InvalidParameterError: an option is out of range.
        """
        super().__init__(context)
        if context.latency is None:
            raise ValueError("smartspec needs a latency model")
        self._latency = context.latency
        self._smoothing = number_option("smoothing", smoothing, 0.0, 0.9999)
        self._explore_every = integer_option("explore_every", explore_every, 1, 1_000_000)
        self._accepted = _FIRST_GUESS * _PRIOR_TOKENS
        self._tested = _PRIOR_TOKENS
        self._steps_without_draft = 0

    @property
    def acceptance_rate(self) -> float:
        """α, 0 … 1."""
        return self._accepted / self._tested

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """The best k for everybody, as far as there is room."""
        most = max((request.draft_limit for request in requests), default=0)
        most = min(most, self.num_speculative_tokens)
        best = max(range(most + 1), key=lambda k: self.goodput(k, requests))
        if best == 0 and most:
            self._steps_without_draft += 1
            if self._steps_without_draft >= self._explore_every:
                best = 1
        if best:
            self._steps_without_draft = 0
        return _lengths(best, requests)

    def goodput(self, k: int, requests: Sequence[RequestState]) -> float:
        """Expected tokens per second if k tokens are drafted for everybody."""
        lengths = _lengths(k, requests)
        alpha = self.acceptance_rate
        gain = sum(sum(alpha**i for i in range(length + 1)) for length in lengths)
        seconds = self._latency.target_seconds(
            sum(lengths) + len(lengths), sum(request.num_tokens for request in requests)
        )
        for depth in range(k):
            drafting = sum(length > depth for length in lengths)
            seconds += self._latency.draft_seconds(drafting)
        return gain / max(seconds, 1e-12)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Follow the acceptance rate in steps that verified something."""
        counts = zip(outcome.num_verified, outcome.num_accepted, strict=True)
        sound = [pair for index, pair in enumerate(counts) if index not in outcome.failed]
        accepted = sum(accepted for _, accepted in sound)
        rejected = sum(accepted < verified for verified, accepted in sound)
        if accepted + rejected:
            self._accepted = self._smoothing * self._accepted + accepted
            self._tested = self._smoothing * self._tested + accepted + rejected


def _lengths(k: int, requests: Sequence[RequestState]) -> list[int]:
    return [min(k, request.draft_limit) for request in requests]
