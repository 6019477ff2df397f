"""Replicates the weights of a model without changing its function.

The residual stream x becomes x' = [x, …, x]. See :mod:`draftwise.zoo.inflate` for why the result
computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftwise.zoo.inflation_plan import InflationPlan

_WRITES_STREAM = ("o_proj", "down_proj")
_READS_STREAM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def power_of_two_coefficients(count: int) -> list[float]:
    """Return ``count`` powers of two that sum to one, as equal as possible."""
    coefficients = [1.0]
    while len(coefficients) < count:
        # The list is descending, so halving its head keeps the spread within a factor of two.
        half = coefficients.pop(0) / 2
        coefficients = sorted([*coefficients, half, half], reverse=True)
    return coefficients


def read_copies(weight: Tensor, copies: int, streams: int = 1) -> Tensor:
    """Replicate the columns of a matrix that reads the residual stream.

    Args:
        weight: ``[out, streams * in]``.
        copies: number of copies of each stream.
        streams: number of streams that the matrix reads side by side.

    Returns:
        ``[out, streams * copies * in]``. Of each stream, block *i* is multiplied by coefficient
        *i*.
    """
    coefficients = power_of_two_coefficients(copies)
    parts = weight.chunk(streams, dim=1)
    return torch.cat([part * factor for part in parts for factor in coefficients], dim=1)


def repeat(weight: Tensor, copies: int, streams: int = 1) -> Tensor:
    """Repeat each stream along the first dimension: ``[streams * n, …]`` to ``copies`` times it."""
    return torch.cat([part for part in weight.chunk(streams) for _ in range(copies)])


def replicate_layer(
    weights: Mapping[str, Tensor], plan: InflationPlan, streams: int = 1
) -> dict[str, Tensor]:
    """Replicate a decoder layer in the format of Llama.

    Args:
        weights: its tensors by name, such as ``self_attn.q_proj.weight``.
        plan: numbers of copies.
        streams: number of streams that its attention reads side by side.
    """
    result = {}
    for name, weight in weights.items():
        module, kind = name.rsplit(".", 2)[-2:]
        inner = plan.num_mlp_copies if "mlp." in name else plan.num_copies
        if module in ("q_norm", "k_norm"):
            result[name] = weight  # a norm of each head
        elif module in _WRITES_STREAM:
            width = weight if kind == "bias" else read_copies(weight, inner)
            result[name] = repeat(width, plan.num_copies)
        elif module in _READS_STREAM:
            # Heads are repeated as one block, so every query head keeps its kv head.
            count = streams if "self_attn." in name else 1
            width = weight if kind == "bias" else read_copies(weight, plan.num_copies, count)
            result[name] = repeat(width, inner)
        else:
            result[name] = repeat(weight, plan.num_copies)
    return result


def source_layer_positions(num_source: int, num_layers: int) -> tuple[int, ...]:
    """Indices of the source's layers among ``num_layers``: evenly spread, ending with the last."""
    return tuple((i + 1) * num_layers // num_source - 1 for i in range(num_source))
