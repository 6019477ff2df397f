"""Speculative Verification as published: greedy selection over the batch by the drawn tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.estimators.tables import AcceptanceTable
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import RequestState


class PublishedVerification(Policy):
    """The paper's rule. **Not lossless** at temperatures above 0; for comparison only.

    Every request drafts γ tokens and the companion scores all of them. With P_i = P̂(S_i, A_i) from
    a table, token i of a request adds Π_{j≤i} P_j expected tokens. Tokens of the whole batch are
    selected in descending order of this value while goodput, (requests + Σ Π P) / T(tokens
    verified), increases. The target draws dropped positions with q′ = 0, although A depends on the
    token drawn there. This biases the output.
    """

    name = "sv-published"
    summary = "the paper's batch greedy by S and A of the drawn token; biased when sampling"
    source = "Speculative Verification"
    signals = frozenset({Signal.OVERLAP, Signal.AGREEMENT, Signal.LOAD})
    filters = True
    lossless = False
    needs_companion = True
    needs_latency = True
    reads_offers = True  # they are selected like all others

    def __init__(self, context: PolicyContext) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model and a companion are required. The
                table starts from the profile's adaptive table, or from the prior, and learns
                online.
        """
        super().__init__(context)
        if context.latency is None:
            raise ValueError("sv-published needs a latency model")
        self._latency = context.latency
        table = None if context.profile is None else context.profile.tables.get("adaptive")
        # Copy the table, because engines that share a profile must not train each other's table.
        self.table = (table or AcceptanceTable.prior()).to(torch.device("cpu"))
        self._companion_scores: CompanionScores | None = None
        self._context = 0

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request."""
        self._context = sum(request.num_tokens for request in requests)
        self._companion_scores = None
        return super().plan_drafts(requests)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select tokens greedily until goodput stops increasing."""
        if companion_scores is None:
            return Plan(draft.tokens, draft.lengths, draft.probs)
        self._companion_scores = companion_scores
        if self.table.values.device != companion_scores.overlap.device:  # in the first step
            self.table = self.table.to(companion_scores.overlap.device)
        num_requests, width = draft.tokens.shape
        drafted = np.arange(width) < np.asarray(draft.lengths)[:, None]
        accepted = (
            self.table.predict(companion_scores.overlap, companion_scores.agreement)
            .cpu()
            .double()
            .numpy()
        )
        prefix_acceptance_prob = np.cumprod(np.where(drafted, accepted, 0.0), axis=1)
        # prefix_acceptance_prob never increases along a request, so a stable sort selects prefixes.
        order = np.argsort(-prefix_acceptance_prob, axis=None, kind="stable")
        order = order[drafted.ravel()[order]]
        tokens = num_requests + np.concatenate(
            [[0.0], np.cumsum(prefix_acceptance_prob.ravel()[order])]
        )
        sizes = num_requests + np.arange(len(order) + 1)
        seconds = [self._latency.target_seconds(float(size), self._context) for size in sizes]
        best = int(np.argmax(tokens / np.asarray(seconds)))
        lengths = np.bincount(order[:best] // width, minlength=num_requests).tolist()
        if draft.probs is not None:
            for row, length in enumerate(lengths):
                draft.probs[row, length:] = 0.0
        return Plan(draft.tokens, tuple(lengths), draft.probs)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Update the table from the acceptance decisions."""
        companion_scores = self._companion_scores
        if companion_scores is None or outcome.acceptance is None:
            return
        acceptance = outcome.acceptance
        width = acceptance.shape[1]
        lengths = acceptance.new_tensor(outcome.known_lengths).unsqueeze(1)
        valid = acceptance.new_tensor(range(width)) < lengths
        reach_probability = acceptance.where(valid, 0.0).cumprod(dim=1).roll(1, dims=1)
        if width:
            reach_probability[:, 0] = 1.0
        self.table.observe(
            companion_scores.overlap[:, :width][valid],
            companion_scores.agreement[:, :width][valid],
            acceptance[valid],
            reach_probability[valid],
        )
