"""Drafts without distributions: empty drafts, and drafts with one-hot proposals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.core.random import StepUniforms
from draftwise.core.types import Draft, OneHotSignals


def empty_draft(num_requests: int, device: torch.device) -> Draft:
    """A draft without tokens."""
    tokens = torch.zeros(num_requests, 0, dtype=torch.long, device=device)
    return Draft(tokens, (0,) * num_requests, None)


def one_hot_draft(
    token_ids: Sequence[Sequence[int]],
    vocab_size: int,
    uniforms: StepUniforms | None,
    signals: bool,
    device: torch.device,
) -> Draft:
    """A draft with one-hot proposals, which stores no distributions.

    Args:
        token_ids: ``[batch]`` proposed tokens of each request.
        vocab_size: vocabulary size of the target.
        uniforms: random numbers of the step; ``None`` if every request is decoded greedily.
        signals: whether to include the draft's signals.
        device: device of the draft.
    """
    lengths = tuple(len(tokens) for tokens in token_ids)
    width = max(lengths, default=0)
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in token_ids]
    tokens = torch.tensor(padded, dtype=torch.long).view(len(lengths), width).to(device)
    return Draft(
        tokens,
        lengths,
        None,
        OneHotSignals(tokens, lengths, vocab_size) if signals else None,
        None if uniforms is None else uniforms.stage,
    )
