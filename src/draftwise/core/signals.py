"""Signals: quantities known before verification, from which acceptance is predicted.

All functions take distributions along the last dimension and any leading shape. For ragged drafts
every entry of the padded batch is computed. Padding entries have all-zero distributions, for which
the result is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(q: Tensor) -> Tensor:
    """H(q) = −Σ q·log q in nats: ``[..., vocab]`` to ``[...]``."""
    # Three times as fast as torch.special.entr, which is not vectorised.
    log_q = q.clamp(min=torch.finfo(q.dtype).tiny).log_()
    summands: Tensor = log_q.mul_(q)
    return -summands.sum(dim=-1)


def overlap(q: Tensor, c: Tensor) -> Tensor:
    """S = Σ min(q, c): ``[..., vocab]`` twice to ``[...]``.

    The probability that a token drawn from q is accepted by c; equals 1 − TV(q, c). (Speculative
    Verification's "similarity".)
    """
    return torch.minimum(q, c).sum(dim=-1)


def agreement(q: Tensor, c: Tensor) -> Tensor:
    """A(x) = min(1, c(x)/q(x)): the probability that c accepts x drawn from q; elementwise.

    Its mean over x ~ q is S. Where q is 0 (x is never drawn), A is 0.
    """
    return torch.where(q > 0, (c / q).clamp(max=1.0), 0.0)


def token_probabilities(q: Tensor, tokens: Tensor) -> Tensor:
    """q(x) of the given tokens: ``[..., vocab]`` and ``[...]`` int64 to ``[...]``."""
    return q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p·log(p/q) in nats; infinite where q is 0 for a token with p > 0.

    For nearly equal distributions, rounding may make it slightly negative.
    """
    summands: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
    return summands.sum(dim=-1)


def pinsker_bound(kl: Tensor) -> Tensor:
    """Lower bound 1 − √(KL/2) on the mean acceptance β = 1 − TV, at least 0.

    Pinsker's inequality; SVIP (Zhang et al. 2024, section 3) applies it to KL(q ‖ p).
    """
    return (1 - (kl.clamp(min=0.0) / 2).sqrt()).clamp(min=0.0)


def bretagnolle_huber_bound(kl: Tensor) -> Tensor:
    """Lower bound 1 − √(1 − exp(−KL)) on the mean acceptance β; never vacuous.

    Bretagnolle and Huber 1979. Tighter than Pinsker's bound for KL above about 1.6.
    """
    return 1 - (-torch.expm1(-kl)).clamp(min=0.0).sqrt()
