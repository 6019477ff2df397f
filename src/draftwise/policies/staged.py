"""Staged speculation: a mid-size model corrects the draft before the target verifies it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.core.rejection import sample
from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import RequestState


class Staged(Policy):
    """The companion verifies the draft, the target verifies the companion (Spector & Re 2023).

    The companion is the mid model. Let c be its distributions. It accepts the drafted tokens one by
    one with probability min(1, c(x)/q(x)). After a rejection it draws a correction from max(c − q,
    0), normalised. The target verifies the accepted tokens and the correction. Nothing is verified
    after the correction. If all tokens are accepted there is no extra token, because the companion
    has no distribution for the position after the last drafted token.

    Why it is lossless. By the law of speculative sampling, the mid stage's token at a position that
    the draft reached has exactly the distribution c, given any earlier tokens. So q′ = c there.
    Attach to each of these tokens a label: whether it was accepted. Whether position i + 1 is
    proposed depends on the labels up to i, because a correction ends the text, and on where the
    draft stopped. Both are known before anything is drawn at i + 1, so this is a predictable cut,
    q′ = 0. The labels are drawn together with the tokens. Given a token, a label has the same
    conditional distribution in the target's text and in the mid stage's text. So labels cancel from
    every ratio p/q′ and integrate out of every residual. Block verification over pairs (token,
    label) therefore uses the formulas over tokens, and its tokens have the distribution p.

    At temperature 0 the mid stage's text consists of the companion's most likely tokens.
    """

    name = "staged"
    summary = "the companion corrects the draft, the target verifies the corrected text"
    source = "Spector & Re 2023, Accelerating LLM Inference with Staged Speculative Decoding"
    signals = frozenset({Signal.AGREEMENT})
    needs_companion = True
    replaces_tokens = True
    reads_offers = True  # they are selected like all others

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._greedy: list[bool] = []

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request."""
        self._greedy = [request.greedy for request in requests]
        return super().plan_drafts(requests)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Run the mid stage and select its tokens."""
        if companion_scores is None:  # nothing was drafted
            return super().select(draft, companion_scores)
        c, tokens = companion_scores.probs, draft.tokens
        num_requests, width = tokens.shape
        device = tokens.device
        row, position = torch.arange(num_requests, device=device), torch.arange(width).to(device)
        # Beyond its context, or where its logits were NaN, the companion has no distribution.
        is_scored = (position < torch.tensor(draft.lengths, device=device).unsqueeze(1)) & (
            c.sum(dim=2) > 0
        )
        num_scored = is_scored.long().cumprod(dim=1).sum(dim=1)
        if draft.probs is None:
            agrees = c.argmax(dim=2) == tokens
        else:
            c = self._one_hot_where_greedy(c)
            agrees = self._accepts(draft, c)
        num_accepted = (agrees & is_scored).long().cumprod(dim=1).sum(dim=1)
        lengths = torch.minimum(num_accepted + 1, num_scored)
        end = num_accepted.clamp(max=width - 1)
        tokens = tokens.clone()
        corrected = num_accepted < lengths
        correction = self._corrections(draft, c, row, end)
        tokens[row, end] = torch.where(corrected, correction, tokens[row, end])
        inside = position < lengths.unsqueeze(1)
        proposals = None
        if draft.probs is not None:
            proposals = torch.zeros_like(draft.probs)
            proposals[:, :width] = c * inside.unsqueeze(2)
        return Plan(
            tokens * inside, tuple(lengths.tolist()), proposals, tuple(num_accepted.tolist())
        )

    def _one_hot_where_greedy(self, c: Tensor) -> Tensor:
        """``[batch, num_tokens, vocab]`` distributions that the mid stage draws from."""
        if not any(self._greedy):
            return c
        most_likely = torch.zeros_like(c).scatter_(2, c.argmax(dim=2, keepdim=True), 1.0)
        greedy = torch.tensor(self._greedy, device=c.device)[:, None, None]
        return torch.where(greedy, most_likely, c)

    def _accepts(self, draft: Draft, c: Tensor) -> Tensor:
        """``[batch, num_tokens]`` whether the mid stage keeps each drafted token."""
        assert draft.probs is not None
        assert draft.stage_uniforms is not None
        width = draft.tokens.shape[1]
        column = draft.tokens.unsqueeze(2)
        c_drawn = c.gather(2, column).squeeze(2)
        q_drawn = draft.probs[:, :width].gather(2, column).squeeze(2)
        return draft.stage_uniforms.accept[:, :width].to(c.device) < c_drawn / q_drawn

    def _corrections(self, draft: Draft, c: Tensor, row: Tensor, end: Tensor) -> Tensor:
        """``[batch]`` the mid stage's token at the position ``end`` (``[batch]``)."""
        c = c[row, end]
        if draft.probs is None:
            return c.argmax(dim=1)
        assert draft.stage_uniforms is not None
        residual = (c - draft.probs[row, end]).clamp_(min=0)
        # If c = q up to rounding, the residual is empty, and c itself is the right distribution.
        empty = residual.sum(dim=1, keepdim=True) <= 0
        uniforms = draft.stage_uniforms.final.to(c.device)[row, end]
        return sample(torch.where(empty, c, residual), uniforms)
