"""Losses between the target's distribution p and the head's distribution q on the draft tokens.

Both are distributions over the tokens that the head can propose, at temperature 1. Where these are
the whole vocabulary, acceptance at this temperature is 1 - TV(p, q). TV is the total variation
(Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# (logits of the head [n, draft_vocab] float32, p [n, draft_vocab] float32) -> [n]
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-Σ p log q. ``[n, draft_vocab]`` twice -> ``[n]`` nats."""
    loss: Tensor = logits.logsumexp(dim=-1) - (p * logits).sum(dim=-1)
    return loss


def kl_divergence(logits: Tensor, p: Tensor) -> Tensor:
    """D(p ‖ q): the cross entropy less the entropy of p, so it has the same gradient."""
    negative_entropy: Tensor = torch.special.xlogy(p, p).sum(dim=-1)
    return cross_entropy(logits, p) + negative_entropy


def total_variation(logits: Tensor, p: Tensor) -> Tensor:
    """½ Σ |p - q|: over the whole vocabulary, the probability that a token is rejected."""
    distance: Tensor = 0.5 * (logits.softmax(dim=-1) - p).abs().sum(dim=-1)
    return distance


def mixed(logits: Tensor, p: Tensor) -> Tensor:
    """Cross entropy and total variation in equal parts."""
    return 0.5 * (cross_entropy(logits, p) + total_variation(logits, p))


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross-entropy": cross_entropy,
        "kl": kl_divergence,
        "total-variation": total_variation,
        "mixed": mixed,
    }
)
