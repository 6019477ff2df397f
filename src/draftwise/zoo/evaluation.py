"""Validation loss per source, and the target's mean acceptance of a small model's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwise.devices import has_fast_bfloat16
from draftwise.zoo.token_stream import TokenizedSource, TokenRows, held_out_rows

_ROWS_PER_BATCH = 8


def _batches(rows: TokenRows, device: torch.device) -> Iterator[Tensor]:
    for first in range(0, len(rows), _ROWS_PER_BATCH):
        yield torch.from_numpy(rows[first : first + _ROWS_PER_BATCH]).to(device)


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    """``[rows, length, vocab]`` float32 logits, with bfloat16 autocast where that is fast.

    Args:
        model: the model.
        inputs: ``[rows, length]`` token ids.
    """
    use_bfloat16 = has_fast_bfloat16(inputs.device)
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=use_bfloat16):
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float()


def mean_loss(model: LlamaForCausalLM, rows: TokenRows) -> float:
    """Cross entropy in nats per token over ``rows`` [num_rows, length + 1]."""
    total, count = 0.0, 0
    for batch in _batches(rows, model.device):
        labels = batch[:, 1:].flatten()
        logits = logits_of(model, batch[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
        count += labels.numel()
    return total / max(count, 1)


def _scored(held_out: Mapping[str, TokenizedSource], mixture: Mapping[str, float]) -> list[str]:
    # A small source may have no held-out documents.
    return [name for name in mixture if len(held_out[name].tokens) > 1]


def _with_mean(
    label: str, values: Mapping[str, float], mixture: Mapping[str, float]
) -> dict[str, float]:
    weight = sum(mixture[name] for name in values)
    mean = sum(mixture[name] * value for name, value in values.items()) / max(weight, 1e-9)
    return {label: mean, **{f"{label}/{name}": value for name, value in values.items()}}


def validation_losses(
    model: LlamaForCausalLM,
    held_out: Mapping[str, TokenizedSource],
    mixture: Mapping[str, float],
    *,
    length: int = 512,
    max_tokens: int = 32_768,
) -> dict[str, float]:
    """Held-out loss in nats per token: ``loss/<source>``, and ``loss`` weighted by the mixture."""
    model.eval()
    losses = {
        name: mean_loss(model, held_out_rows(held_out[name], length, max_tokens))
        for name in _scored(held_out, mixture)
    }
    return _with_mean("loss", losses, mixture)


def mean_acceptance(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, rows: TokenRows, *, first: int = 0
) -> float:
    """Mean of Σ min(p, q) at temperature 1, over the predictions from position ``first`` on.

    rows: [num_rows, length + 1]. The last token of each row is not an input.
    """
    draft.eval()
    target.eval()
    total, count = 0.0, 0
    for batch in _batches(rows, target.device):
        p = logits_of(target, batch[:, :-1]).softmax(-1)
        q = logits_of(draft, batch[:, :-1]).softmax(-1)
        overlap = torch.minimum(p, q).sum(-1)[:, first:]
        total += float(overlap.sum())
        count += overlap.numel()
    return total / max(count, 1)


def acceptances(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    held_out: Mapping[str, TokenizedSource],
    mixture: Mapping[str, float],
    *,
    length: int = 512,
    max_tokens: int = 8_192,
) -> dict[str, float]:
    """Held-out acceptance: ``acceptance/<source>``, and ``acceptance`` weighted by the mixture."""
    values = {
        name: mean_acceptance(draft, target, held_out_rows(held_out[name], length, max_tokens))
        for name in _scored(held_out, mixture)
    }
    return _with_mean("acceptance", values, mixture)
