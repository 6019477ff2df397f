"""SmartSpec: one draft length for the whole batch, chosen for the best estimated goodput."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.core.types import Outcome, StepTimes
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import RequestState
from draftwise.policies.options import integer_option, number_option

# Initial acceptance rate, and its weight as a number of observed tokens.
_FIRST_GUESS = 0.7
_PRIOR_TOKENS = 4.0


class SmartSpec(Policy):
    """Draft and verify the k in 0 … γ that maximises goodput (Liu et al. 2024, sections 4 and 5).

    With acceptance rate α, a request gains (1 − α^{k+1})/(1 − α) tokens on average from k drafted
    tokens, so

        goodput(k) = Σ_b (1 − α^{k_b+1})/(1 − α) / T(k),   k_b = k or what the request has room for,

    where T is the time of k passes of the draft and of the target's pass over Σ (k_b + 1) tokens. α
    is a moving average over the batch of the fraction of accepted tokens. Tokens after a rejection
    are not counted. k is chosen before drafting, from earlier steps only, so it is predictable.

    Steps without drafts teach nothing about acceptance. So after every ``explore_every`` such
    steps, one token per request is drafted. This costs less than 1/``explore_every`` of the time if
    the step takes less than twice as long as a step without drafts.
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
            context: see :class:`PolicyContext`; a latency model is required.
            smoothing: weight of a step in α relative to the step after it, 0 … 0.9999.
            explore_every: number of steps without drafts until one token is drafted to learn from.

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

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The best k for every request."""
        most = max((request.draft_limit for request in requests), default=0)
        most = min(most, self.num_speculative_tokens)
        best = max(range(most + 1), key=lambda k: self.goodput(k, requests))
        if best == 0 and most:
            self._steps_without_draft += 1
            if self._steps_without_draft >= self._explore_every:
                best = 1
        if best:
            self._steps_without_draft = 0
        return DraftPlan([best] * len(requests))

    def goodput(self, k: int, requests: Sequence[RequestState]) -> float:
        """Expected tokens per second if k tokens are drafted for every request."""
        lengths = [min(k, request.draft_limit) for request in requests]
        alpha = self.acceptance_rate
        gain = sum(sum(alpha**i for i in range(length + 1)) for length in lengths)
        seconds = self._latency.target_seconds(
            sum(lengths) + len(lengths), sum(request.num_tokens for request in requests)
        )
        drafting = [sum(length > depth for length in lengths) for depth in range(k)]
        seconds += self._latency.drafting_seconds(drafting)
        return gain / max(seconds, 1e-12)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Update the acceptance rate from a step that verified drafted tokens."""
        counts = zip(outcome.num_verified, outcome.num_accepted, strict=True)
        valid = [pair for index, pair in enumerate(counts) if index not in outcome.failed]
        accepted = sum(accepted for _, accepted in valid)
        rejected = sum(accepted < verified for verified, accepted in valid)
        if accepted + rejected:
            self._accepted = self._smoothing * self._accepted + accepted
            self._tested = self._smoothing * self._tested + accepted + rejected
