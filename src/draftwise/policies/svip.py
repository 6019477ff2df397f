"""SVIP: stops drafting where the draft's distribution has high entropy."""

from __future__ import annotations

from torch import Tensor

from draftwise.policies.base import Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.options import number_option


class Svip(Policy):
    """Stop after a token drawn from a distribution with √H(q) > h (Zhang et al. 2024, algorithm 1).

    The square root comes from Pinsker's inequality: β ≥ 1 − √(KL(q ‖ p)/2). The cross entropy in
    the divergence is assumed to be proportional to H(q). H is in nats. The authors' code tests
    √(0.15·H) > 0.3. Since √(0.15·H) = √0.15·√H, this is h = 0.3/√0.15 ≈ 0.77, the default here.
    ``num_speculative_tokens`` caps the draft length; the paper uses 40.
    """

    name = "svip"
    summary = "stops after a token from a distribution of high entropy"
    source = "Zhang et al. 2024, Draft Model Knows When to Stop (SVIP)"
    signals = frozenset({Signal.ENTROPY})

    def __init__(self, context: PolicyContext, threshold: float = 0.77) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            threshold: h, at least 0; the square root of an entropy in nats.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """√H(q) ≤ h."""
        assert position.entropy is not None
        return position.entropy.sqrt() <= self._threshold
