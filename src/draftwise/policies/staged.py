"""Staged speculation: a mid model corrects the draft before the target sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.core.rejection import sample
from draftwise.core.types import Draft, Judgement, Plan
from draftwise.policies.base import PolicyContext, RequestState, Signal
from draftwise.policies.stopping import EarlyStop


class Staged(EarlyStop):
    """The companion verifies the draft, the target verifies the companion (Spector & Re 2023).

    The companion plays the mid model. With c its distributions it accepts the drafted tokens one
    by one with probability min(1, c(x)/q(x)), and where it rejects draws the token from
    max(c − q, 0), normalised. What the target is given is this text: the accepted tokens and the
    correction. Nothing is verified behind the correction, and there is no extra token where all
    were accepted, because the companion says nothing of the position after the last drafted one.

    Why it is lossless. By the law of speculative sampling, whatever came before, the text of the
    mid stage at a position that the draft reached is distributed exactly as c; so q′ = c there.
    Note beside each of these tokens whether it was accepted. Whether position i + 1 is proposed at
    all depends on the notes up to i (a correction ends the text) and on where the draft stopped,
    which was known before anything was drawn at i + 1: a predictable cut, q′ = 0. The notes are
    drawn along with the tokens and have the same conditional law given a token in the target's and
    in the mid's text, so they cancel from every ratio p/q′ and integrate out of every residual:
    block verification over pairs (token, note) uses the formulas over tokens and its tokens have
    the distribution p.

    At temperature 0 the mid stage's text is the companion's most likely tokens.
    """

    name = "staged"
    summary = "the companion corrects the draft, the target verifies the corrected text"
    source = "Spector & Re 2023, Accelerating LLM Inference with Staged Speculative Decoding"
    signals = frozenset({Signal.AGREEMENT})
    needs_companion = True
    replaces_tokens = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._greedy: list[bool] = []

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for everybody, as far as there is room."""
        self._greedy = [request.greedy for request in requests]
        return super().draft_lengths(requests)

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """Run the mid stage."""
        if judgement is None:  # nothing was drafted
            return super().select(draft, judgement)
        c, tokens = judgement.beliefs, draft.tokens
        num_requests, width = tokens.shape
        device = tokens.device
        row, position = torch.arange(num_requests, device=device), torch.arange(width).to(device)
        # Beyond its context, or where it broke down, the companion has no distribution.
        judged = (position < torch.tensor(draft.lengths, device=device).unsqueeze(1)) & (
            c.sum(dim=2) > 0
        )
        known = judged.long().cumprod(dim=1).sum(dim=1)
        if draft.probs is None:
            agrees = c.argmax(dim=2) == tokens
        else:
            c = self._one_hot_where_greedy(c)
            agrees = self._accepts(draft, c)
        num_accepted = (agrees & judged).long().cumprod(dim=1).sum(dim=1)
        lengths = torch.minimum(num_accepted + 1, known)
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
        """What the mid stage draws from: ``[batch, num_tokens, vocab]``."""
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
        # c = q up to rounding leaves no residual; then c itself is the right distribution.
        empty = residual.sum(dim=1, keepdim=True) <= 0
        uniforms = draft.stage_uniforms.final.to(c.device)[row, end]
        return sample(torch.where(empty, c, residual), uniforms)
