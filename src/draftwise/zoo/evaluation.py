"""Validation loss per source, and the target's mean acceptance of a small model's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftwise.devices import has_fast_bfloat16
from draftwise.zoo.hybrid import Hybrid
from draftwise.zoo.tokens import TokenRows, Tokens, held_out_rows

_ROWS_PER_BATCH = 8


def mean_loss(model: PreTrainedModel, rows: TokenRows) -> float:
    """Cross entropy in nats per token over ``rows`` [num_rows, length + 1]."""
    model.eval()
    total, count = 0.0, 0
    for batch in _batches(rows, model.device):
        labels = batch[:, 1:].flatten()
        logits = _logits(model, batch[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        count += labels.numel()
    return total / max(count, 1)


def mean_acceptance(
    draft: PreTrainedModel, target: PreTrainedModel, rows: TokenRows, *, first: int = 0
) -> float:
    """Mean of Σ min(p, q) at temperature 1, over the predictions from position ``first`` on.

    rows: [num_rows, length + 1]. The last token of each row is not an input.
    """
    draft.eval()
    target.eval()
    total, count = 0.0, 0
    for batch in _batches(rows, target.device):
        p = _logits(target, batch[:, :-1]).softmax(-1)
        q = _logits(draft, batch[:, :-1]).softmax(-1)
        overlap = torch.minimum(p, q).sum(-1)[:, first:]
        total += float(overlap.sum())
        count += overlap.numel()
    return total / max(count, 1)


@torch.no_grad()
def mean_mtp_acceptance(model: Hybrid, rows: TokenRows) -> float:
    """Mean of Σ min(p, q) at temperature 1, p from a model and q from its MTP layer.

    rows: [num_rows, length + 1]. The last token of each row is not an input.
    """
    model.eval()
    total, count = 0.0, 0
    for batch in _batches(rows, model.device):
        with _autocast(model.device):
            logits, second = model.both(batch[:, :-1])
        p, q = logits[:, 1:].float().softmax(-1), second.float().softmax(-1)
        overlap = torch.minimum(p, q).sum(-1)
        total += float(overlap.sum())
        count += overlap.numel()
    return total / max(count, 1)


def by_source(
    name: str,
    score: Callable[[TokenRows], float],
    held_out: Mapping[str, Tokens],
    mixture: Mapping[str, float],
    max_tokens: int,
    length: int = 512,
) -> dict[str, float]:
    """Scores of held-out text: ``<name>/<source>``, and ``<name>`` weighted by the mixture.

    Args:
        name: name of the score.
        score: computes it for rows ``[num_rows, length + 1]``.
        held_out: held-out tokens of the sources. One without any is left out.
        mixture: weights of the sources.
        max_tokens: largest number of tokens of a source that are scored.
        length: tokens per row.
    """
    values = {
        source: score(held_out_rows(held_out[source], length, max_tokens))
        for source in mixture
        if len(held_out[source]) > 1
    }
    weight = sum(mixture[source] for source in values)
    mean = sum(mixture[source] * value for source, value in values.items()) / max(weight, 1e-9)
    return {name: mean, **{f"{name}/{source}": value for source, value in values.items()}}


def _batches(rows: TokenRows, device: torch.device) -> Iterator[Tensor]:
    for first in range(0, len(rows), _ROWS_PER_BATCH):
        yield torch.from_numpy(rows[first : first + _ROWS_PER_BATCH]).to(device)


@torch.no_grad()
def _logits(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """``[rows, length, vocab]`` float32 logits, with bfloat16 autocast where that is fast."""
    with _autocast(inputs.device):
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float()


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bfloat16(device))
