"""Calibration of the confidence of a head of DSpark, by sequential temperatures.

The confidence c_k estimates the probability that token k is accepted if those before it are. So
Π_{i ≤ k} c_i estimates that the first k tokens are accepted. From left to right, the logit of each
c_k is divided by the temperature with which this product has the smallest calibration error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from draftwise.distillation.block_head import BlockHead
from draftwise.distillation.block_task import blocks_along, logits_along
from draftwise.distillation.documents import Rows
from draftwise.distillation.evaluation import HeldOut
from draftwise.distillation.teacher import Reading

# Temperatures that are tried: 1/4 … 4, each 5 % above the one before.
_GRID = torch.logspace(-2, 2, 58, base=2.0)
_NUM_BINS = 15


@torch.no_grad()
def calibrate(
    head: BlockHead, embedding: Tensor, target_ids: Tensor, held_out: HeldOut
) -> Mapping[str, float]:
    """Find the temperatures of a head's confidence, and set them.

    Args:
        head: a head with a confidence head.
        embedding: ``[vocab, hidden]`` of the target.
        target_ids: ``[draft_vocab]`` the target's ids of its tokens.
        held_out: held-out answers, at the temperatures at which they were given.

    Returns:
        ``confidence_error_raw`` and ``confidence_error``: the mean calibration error over the
        tokens of a block before and after; empty if no answer is long enough.
    """
    logits: list[Tensor] = []

    def chain(rows: Rows, reading: Reading, begins: Tensor, num_steps: int) -> Iterator[Tensor]:
        """What the head proposes along given texts. Its confidence is noted on the way."""
        with reading.autocast():
            hidden, before, is_anchor = blocks_along(head, embedding, rows, reading, begins)
            found = head.confidence_logits(hidden, before)
            assert found is not None
            logits.append(found[is_anchor])
            yield from logits_along(head, hidden, before, is_anchor, num_steps)

    drafts = held_out.followed(chain, target_ids, head.config.num_drafted)
    accepted = [draft.accepted.T.cumprod(dim=1) for draft in drafts]
    if not accepted:
        return {}
    own, reached = torch.cat(logits), torch.cat(accepted)
    temperatures, errors = sequential_temperatures(own, reached)
    head.confidence_temperatures.copy_(temperatures)
    raw = torch.sigmoid(own).cumprod(dim=1)
    before_ = [calibration_error(raw[:, k], reached[:, k]) for k in range(own.shape[1])]
    return {
        "confidence_error_raw": sum(before_) / len(before_),
        "confidence_error": sum(errors) / len(errors),
    }


def sequential_temperatures(logits: Tensor, reached: Tensor) -> tuple[Tensor, list[float]]:
    """Temperatures from left to right, each by a search over a grid.

    Args:
        logits: ``[n, k]`` of the confidence.
        reached: ``[n, k]`` probability that the first tokens are all accepted.

    Returns:
        ``[k]`` temperatures, and the calibration error of each product.
    """
    survival = torch.ones(len(logits), device=logits.device)
    temperatures, errors = [], []
    for k in range(logits.shape[1]):
        tried = [survival * torch.sigmoid(logits[:, k] / each) for each in _GRID.tolist()]
        found = [calibration_error(each, reached[:, k]) for each in tried]
        best = min(range(len(found)), key=found.__getitem__)
        survival = tried[best]
        temperatures.append(float(_GRID[best]))
        errors.append(found[best])
    return torch.tensor(temperatures, device=logits.device), errors


def calibration_error(p: Tensor, happened: Tensor) -> float:
    """Expected calibration error: the mean of |mean p - mean outcome| over 15 equal bins of p.

    Args:
        p: ``[n]`` estimated probabilities.
        happened: ``[n]`` outcomes, or their probabilities.
    """
    bins = (p * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    zeros = torch.zeros(_NUM_BINS, dtype=torch.float64, device=p.device)
    differences = zeros.index_add(0, bins, (p - happened).double())
    return float(differences.abs().sum()) / len(p)
