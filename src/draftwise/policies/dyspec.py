"""DySpec on a chain: go on while the draft finds what it wrote likely as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.policies.base import DraftPosition, PolicyContext, RequestState, Signal
from draftwise.policies.options import number_option
from draftwise.policies.stopping import EarlyStop, RunningProduct


class DySpec(EarlyStop):
    """Go on drafting while Π_{j≤i} q(x_j) ≥ threshold (Xiong et al. 2024, threshold construction).

    The paper grows a token tree where the product of draft probabilities, its estimate of the
    chance that a node is reached and accepted, is largest; with a threshold all nodes of a layer
    are decided at once. A chain is the tree without branches. Deciding about position i + 1 by the
    tokens up to i is predictable, and everything drafted is verified.
    """

    name = "dyspec"
    summary = "drafts while the product of draft probabilities stays above a threshold"
    source = "Xiong et al. 2024, DySpec: Faster Speculative Decoding with Dynamic Token Tree"
    signals = frozenset({Signal.TOKEN_PROBABILITY})

    def __init__(self, context: PolicyContext, threshold: float = 0.2) -> None:
        """Set up.

        Args:
            context: what every policy gets.
            threshold: smallest product with which drafting goes on, 0 … 1.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0, 1.0)
        self._reached = RunningProduct()

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for everybody, as far as there is room."""
        self._reached.begin(len(requests))
        return super().draft_lengths(requests)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """Π q(x_j) ≥ threshold."""
        assert position.token_probs is not None
        return self._reached.times(position, position.token_probs) >= self._threshold
