"""AdaEDL: stops drafting where an entropy-based bound on acceptance falls below a threshold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.core.types import Outcome, StepTimes
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition, RequestState
from draftwise.policies.options import number_option


@dataclass
class _Threshold:
    """λ of one request, and the moving average of its acceptance rate."""

    value: float
    acceptance_rate: float


class AdaEdl(Policy):
    """Stop where 1 − √(γ_c·H(q)) < λ, λ following the acceptance rate (Agrawal et al. 2024).

    The left side is an approximate lower bound on the acceptance probability: Pinsker's inequality
    with a cross entropy proportional to H(q). After a step with n of m drafted tokens accepted
    (their algorithm 1, after Zhang et al. 2023, "Draft & Verify", section 3.4)

        AR ← β₁·AR + (1 − β₁)·n/m
        λ′ = λ + ε if AR < α;  λ − ε if AR ≥ α and n is below the cap;  λ otherwise
        λ ← β₂·λ + (1 − β₂)·λ′

    so drafts get shorter while acceptance is below its target. There are three differences from the
    paper. The paper serves one request; here each request has its own λ and AR. The paper does not
    specify where AR starts; here it starts at α. The paper stops before the token whose
    distribution is uncertain; here that token is drawn and verified, and the next token is not
    drafted.
    """

    name = "adaedl"
    summary = "stops where an entropy bound on acceptance falls below an adaptive threshold"
    source = "Agrawal et al. 2024, AdaEDL: Early Draft Stopping for Speculative Decoding"
    signals = frozenset({Signal.ENTROPY, Signal.HISTORY})

    def __init__(
        self,
        context: PolicyContext,
        threshold: float = 0.5,
        entropy_factor: float = 0.2,
        target_acceptance: float = 0.9,
        acceptance_smoothing: float = 0.5,
        threshold_smoothing: float = 0.9,
        threshold_step: float = 0.01,
    ) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            threshold: λ of a new request, 0 … 1 (the paper tries 0.3 … 0.9).
            entropy_factor: γ_c, at least 0.
            target_acceptance: α, 0 … 1.
            acceptance_smoothing: β₁, 0 … 1.
            threshold_smoothing: β₂, 0 … 1.
            threshold_step: ε, 0 … 1.
        """
        super().__init__(context)
        self._first_threshold = number_option("threshold", threshold, 0.0, 1.0)
        self._entropy_factor = number_option("entropy_factor", entropy_factor, 0.0)
        self._alpha = number_option("target_acceptance", target_acceptance, 0.0, 1.0)
        self._beta1 = number_option("acceptance_smoothing", acceptance_smoothing, 0.0, 1.0)
        self._beta2 = number_option("threshold_smoothing", threshold_smoothing, 0.0, 1.0)
        self._epsilon = number_option("threshold_step", threshold_step, 0.0, 1.0)
        self._thresholds: dict[int, _Threshold] = {}
        self._step: list[_Threshold] = []

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request."""
        new = (_Threshold(self._first_threshold, self._alpha) for _ in requests)
        self._step = [
            self._thresholds.setdefault(request.request_id, first)
            for request, first in zip(requests, new, strict=True)
        ]
        return super().plan_drafts(requests)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """1 − √(γ_c·H(q)) ≥ λ."""
        assert position.entropy is not None
        bound = 1 - (self._entropy_factor * position.entropy).sqrt()
        thresholds = [self._step[request].value for request in position.requests]
        return bound >= torch.tensor(thresholds, device=bound.device)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Algorithm 1, for each request that drafted."""
        counts = zip(outcome.num_drafted, outcome.num_accepted, strict=True)
        for index, (drafted, accepted) in enumerate(counts):
            if drafted and index not in outcome.failed:
                self._adapt(self._step[index], drafted, accepted)

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        for request in request_ids:
            self._thresholds.pop(request, None)

    def _adapt(self, threshold: _Threshold, drafted: int, accepted: int) -> None:
        rate = self._beta1 * threshold.acceptance_rate + (1 - self._beta1) * accepted / drafted
        wanted = threshold.value
        if rate < self._alpha:
            wanted += self._epsilon
        elif accepted < self.num_speculative_tokens:
            wanted -= self._epsilon
        value = self._beta2 * threshold.value + (1 - self._beta2) * wanted
        threshold.value = min(1.0, max(0.0, value))
        threshold.acceptance_rate = rate
