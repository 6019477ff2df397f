"""TETRIS as published: exact selection over the batch, which biases the output."""

from __future__ import annotations

import torch

from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.policies.base import Policy, PolicyContext, Signal
from draftwise.policies.tetris import cumulative_probability, verified_per_request


class TetrisPublished(Policy):
    """Verifies the K tokens of the batch with the largest Π_{j≤i} q(x_j).

    Wu et al. 2025, algorithm 1. K is γ − ``extra`` tokens for each request that drafted. A token is
    dropped because it is unlikely itself, or because other requests drew likelier tokens. The
    target then draws the position as if nothing had been proposed. So unlikely tokens lose the
    probability that the draft would have given them. At temperature 0 this changes nothing. At
    higher temperatures the output does not have the target's distribution.
    :mod:`draftwise.policies.tetris` is the lossless version.
    """

    name = "tetris-published"
    summary = "exactly the batch's most likely tokens; biased at temperature above 0"
    source = "Wu et al. 2025, TETRIS: Optimal Draft Token Selection"
    signals = frozenset({Signal.TOKEN_PROBABILITY, Signal.LOAD})
    filters = True
    lossless = False
    reads_offers = True  # they are selected like all others

    def __init__(self, context: PolicyContext, extra: int = 1) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            extra: number of drafted tokens per request beyond the average number verified, 0 … 64.
                The average verified is at least one.
        """
        super().__init__(context)
        self._per_request = verified_per_request(self.num_speculative_tokens, extra)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the top K over the batch. W decreases along a draft, so they are prefixes."""
        if draft.signals is None:  # nothing was drafted
            return super().select(draft, companion_scores)
        product = cumulative_probability(draft.signals)
        position = torch.arange(product.shape[1], device=product.device)
        drafted = position < torch.tensor(draft.lengths, device=product.device).unsqueeze(1)
        capacity = self._per_request * sum(length > 0 for length in draft.lengths)
        # A stable sort keeps prefixes if products are equal.
        order = product.masked_fill(~drafted, -1.0).flatten().argsort(descending=True, stable=True)
        chosen = torch.zeros_like(drafted).flatten()
        chosen[order[:capacity]] = True
        lengths = (chosen.view_as(drafted) & drafted).sum(dim=1)
        proposals = draft.probs
        if proposals is not None:
            beyond = torch.arange(proposals.shape[1], device=product.device) >= lengths.unsqueeze(1)
            proposals = proposals.masked_fill(beyond.unsqueeze(2), 0.0)
        return Plan(draft.tokens, tuple(lengths.tolist()), proposals)
