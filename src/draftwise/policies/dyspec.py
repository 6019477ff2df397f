"""DySpec on a chain: continues while the product of draft probabilities is high enough."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition, RequestState
from draftwise.policies.options import number_option
from draftwise.policies.stopping import RunningProduct


class DySpec(Policy):
    """Continue while Π_{j≤i} q(x_j) ≥ threshold (Xiong et al. 2024, threshold construction).

    The paper grows a token tree at the nodes with the largest product of draft probabilities. This
    product estimates the probability that a node is reached and accepted. With a threshold, all
    nodes of a layer are decided at once. A chain is a tree without branches. The decision about
    position i + 1 depends on the tokens up to i, so it is predictable. Everything drafted is
    verified.
    """

    name = "dyspec"
    summary = "drafts while the product of draft probabilities stays above a threshold"
    source = "Xiong et al. 2024, DySpec: Faster Speculative Decoding with Dynamic Token Tree"
    signals = frozenset({Signal.TOKEN_PROBABILITY})

    def __init__(self, context: PolicyContext, threshold: float = 0.2) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            threshold: minimum product to continue drafting, 0 … 1.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0, 1.0)
        self._product = RunningProduct()

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request."""
        self._product.begin(len(requests))
        return super().plan_drafts(requests)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """Π q(x_j) ≥ threshold."""
        assert position.token_probs is not None
        return self._product.times(position, position.token_probs) >= self._threshold
