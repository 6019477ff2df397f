"""Stops drafting after a token to which the draft gives a low probability."""

from __future__ import annotations

from torch import Tensor

from draftwise.policies.base import Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.options import number_option


class Confidence(Policy):
    """Stop after a drawn token with q(x) < threshold.

    This is ``assistant_confidence_threshold`` of Hugging Face's assisted generation, with its
    default. The token itself is still verified.
    """

    name = "confidence"
    summary = "stops after a token that the draft itself finds unlikely"
    source = "Hugging Face transformers, assistant_confidence_threshold"
    signals = frozenset({Signal.TOKEN_PROBABILITY})

    def __init__(self, context: PolicyContext, threshold: float = 0.4) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            threshold: minimum q(x) to continue drafting, 0 … 1.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0, 1.0)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """q(x) ≥ threshold."""
        assert position.token_probs is not None
        return position.token_probs >= self._threshold
