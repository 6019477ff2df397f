"""Losses between the target's distribution p and the draft's distribution q on the draft's tokens.

Both are distributions over the tokens that the draft can propose, at temperature 1. Where these are
the whole vocabulary, acceptance at this temperature is 1 - TV(p, q). TV is the total variation
(Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6).

Each loss returns its gradient with respect to the logits too. A vocabulary is large, so the passes
over arrays of this size cost more than the arithmetic, and automatic differentiation makes many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# (logits of the draft [n, draft_vocab] float32, p [n, draft_vocab] float32)
# -> loss [n], gradient [n, draft_vocab]
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Float32 logits of one part of a batch. On a CPU, what is computed from them stays in its cache.
_PART_BYTES = {"cpu": 2**21, "cuda": 2**28}


def cross_entropy(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-Σ p log q in nats, and its gradient q - p."""
    loss = logits.logsumexp(dim=-1) - (p * logits).sum(dim=-1)
    return loss, logits.softmax(dim=-1).sub_(p)


def kl_divergence(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """D(p ‖ q): the cross entropy less the entropy of p, so it has the same gradient."""
    loss, gradient = cross_entropy(logits, p)
    return loss + torch.special.xlogy(p, p).sum(dim=-1), gradient


def total_variation(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """½ Σ |q - p|: over the whole vocabulary, the probability that a token is rejected.

    With s = sign(q - p), the gradient is ½ q (s - Σ q s).
    """
    q = logits.softmax(dim=-1)
    difference = q - p
    sign = difference.sign()
    mean = (q * sign).sum(dim=-1, keepdim=True)
    return 0.5 * difference.abs_().sum(dim=-1), sign.sub_(mean).mul_(q).mul_(0.5)


def mixed(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and total variation in equal parts."""
    entropy, of_entropy = cross_entropy(logits, p)
    variation, of_variation = total_variation(logits, p)
    return 0.5 * (entropy + variation), of_entropy.add_(of_variation).mul_(0.5)


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross-entropy": cross_entropy,
        "kl": kl_divergence,
        "total-variation": total_variation,
        "mixed": mixed,
    }
)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, places: Tensor, loss: Loss) -> Tensor:
        gradient = torch.empty_like(logits)
        total = torch.zeros((), device=logits.device)
        size = max(1, _PART_BYTES[logits.device.type] // (4 * logits.shape[1]))
        for first in range(0, len(logits), size):
            part = slice(first, first + size)
            values, gradient[part] = loss(logits[part].float(), p[places[part]])
            total += values.sum()
        ctx.save_for_backward(gradient)
        return total / len(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grad / len(gradient)).to(gradient.dtype), None, None, None


def mean_loss(loss: Loss, logits: Tensor, p: Tensor, places: Tensor) -> Tensor:
    """Mean loss of the positions of a batch, which autograd can differentiate by the logits.

    Args:
        loss: one of :data:`LOSSES`.
        logits: ``[n, draft_vocab]`` of the draft, in any data type; at least one position.
        p: ``[m, draft_vocab]`` float32 distributions of the target.
        places: ``[n]`` index of each position's distribution.
    """
    mean: Tensor = _MeanLoss.apply(logits, p, places, loss)  # type: ignore[no-untyped-call]
    return mean
