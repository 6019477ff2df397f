"""TETRIS as published: exact batch-wide selection, which biases the output."""

from __future__ import annotations

import torch

from draftwise.core.types import Draft, Judgement, Plan
from draftwise.policies.base import PolicyContext, Signal
from draftwise.policies.stopping import EarlyStop
from draftwise.policies.tetris import cumulative_probability, verified_per_request


class TetrisPublished(EarlyStop):
    """Verify the K tokens with the largest Π_{j≤i} q(x_j) of the batch.

    Wu et al. 2025, algorithm 1. K is γ − ``extra`` tokens for each request that drafted. A token is
    dropped because it is itself unlikely, or because other requests drew likelier ones, and the
    target then draws the position as if nothing had been proposed. Unlikely tokens so lose the
    share that the draft would have given them: at temperature 0 nothing changes, above it the
    output is not the target's distribution. :mod:`draftwise.policies.tetris` is the lossless form.
    """

    name = "tetris-published"
    summary = "exactly the batch's likeliest tokens; biased at temperature above 0"
    source = "Wu et al. 2025, TETRIS: Optimal Draft Token Selection"
    signals = frozenset({Signal.TOKEN_PROBABILITY, Signal.LOAD})
    filters = True
    lossless = False

    def __init__(self, context: PolicyContext, extra: int = 1) -> None:
        """Set up.

        Args:
            context: what every policy gets.
            extra: how many more tokens a request drafts than it has verified on average, 0 … 64;
                at least one is verified.
        """
        super().__init__(context)
        self._per_request = verified_per_request(self.num_speculative_tokens, extra)

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """The top K over the batch; W falls along a draft, so they are prefixes."""
        if draft.signals is None:  # nothing was drafted
            return super().select(draft, judgement)
        reached = cumulative_probability(draft.signals)
        position = torch.arange(reached.shape[1], device=reached.device)
        drafted = position < torch.tensor(draft.lengths, device=reached.device).unsqueeze(1)
        capacity = self._per_request * sum(length > 0 for length in draft.lengths)
        # A stable order keeps prefixes where equal products tie.
        order = reached.masked_fill(~drafted, -1.0).flatten().argsort(descending=True, stable=True)
        chosen = torch.zeros_like(drafted).flatten()
        chosen[order[:capacity]] = True
        lengths = (chosen.view_as(drafted) & drafted).sum(dim=1)
        proposals = draft.probs
        if proposals is not None:
            beyond = torch.arange(proposals.shape[1], device=reached.device) >= lengths.unsqueeze(1)
            proposals = proposals.masked_fill(beyond.unsqueeze(2), 0.0)
        return Plan(draft.tokens, tuple(lengths.tolist()), proposals)
