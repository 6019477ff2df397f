"""Sizes and shapes of inflated models (see :mod:`draftwise.zoo.inflate`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from transformers import LlamaConfig

# Part of the cache key. Increment it whenever the output of ``inflate`` changes for the same input.
INFLATE_VERSION = 2

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmbg]?)")
# Llama-like models of 0.2 to 1 billion parameters are 60 to 130 times as wide as they are deep.
_IDEAL_ASPECT = 100.0
_MAX_COPIES = 64
# The native kernels for large models need widths that are multiples of this.
_WIDTH_UNIT = 32


def parse_num_parameters(text: str) -> int:
    """Read a size such as ``200m``, ``1.5B`` or ``8704128``.

    Raises :class:`InvalidParameterError` for anything else.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise InvalidParameterError(
            "parameters", f"must be a size such as 200m, 1.5b or 8704128, got {text!r}"
        )
    return round(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class InflationPlan:
    """Replication factors and size of an inflated model.

    Attributes:
        num_copies: copies of the residual stream and of the attention heads, which must have
            matching widths.
        num_mlp_copies: copies of the MLP's hidden units.
        num_layers: layers of the result; those beyond the source's are identities.
        num_parameters: parameters of the result, with tied embeddings counted once.
    """

    num_copies: int
    num_mlp_copies: int
    num_layers: int
    num_parameters: int


def count_parameters(config: LlamaConfig, copies: int, mlp_copies: int, num_layers: int) -> int:
    """Number of parameters of a Llama model with shape ``config`` after replication."""
    hidden: int = config.hidden_size * copies
    heads = config.num_attention_heads * copies * config.head_dim
    kv_heads = config.num_key_value_heads * copies * config.head_dim
    mlp = config.intermediate_size * mlp_copies
    layer = 2 * hidden * heads + 2 * hidden * kv_heads + 3 * hidden * mlp + 2 * hidden
    if config.attention_bias:
        layer += heads + 2 * kv_heads + hidden
    if config.mlp_bias:
        layer += 2 * mlp + hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    size: int = embeddings + num_layers * layer + hidden
    return size


def _candidates(config: LlamaConfig, num_parameters: int) -> Iterator[InflationPlan]:
    for copies in range(1, _MAX_COPIES + 1):
        for mlp_copies in range(max(1, copies - copies // 3), copies + copies // 3 + 1):
            base = count_parameters(config, copies, mlp_copies, 0)
            layer = count_parameters(config, copies, mlp_copies, 1) - base
            ideal = (num_parameters - base) / layer
            for layers in {math.floor(ideal), math.ceil(ideal)}:
                if layers >= config.num_hidden_layers:
                    size = base + layers * layer
                    yield InflationPlan(copies, mlp_copies, layers, size)


def choose_plan(config: LlamaConfig, num_parameters: int) -> InflationPlan:
    """Return a plan close to ``num_parameters`` with the proportions of a typical model.

    Raises :class:`InvalidParameterError` if the source is larger than ``num_parameters``.
    """
    source_size = count_parameters(config, 1, 1, config.num_hidden_layers)
    plans = list(_candidates(config, num_parameters))
    if num_parameters < source_size or not plans:
        raise InvalidParameterError(
            "num_parameters",
            f"must be at least {source_size:,}, the size of the source, and at most what "
            f"{_MAX_COPIES} copies of it permit, got {num_parameters:,}",
        )

    def cost(plan: InflationPlan) -> float:
        aspect = config.hidden_size * plan.num_copies / plan.num_layers
        shape = abs(math.log(aspect / _IDEAL_ASPECT))
        mlp = abs(math.log(plan.num_mlp_copies / plan.num_copies))
        kernels = 0.0 if _fits_kernels(config, plan) else 1.0
        return 20 * abs(math.log(plan.num_parameters / num_parameters)) + shape + mlp + kernels

    return min(plans, key=cost)


def _fits_kernels(config: LlamaConfig, plan: InflationPlan) -> bool:
    """Whether the widths of the residual stream, the heads and the MLP fit the native kernels."""
    widths = (
        config.hidden_size * plan.num_copies,
        config.num_key_value_heads * config.head_dim * plan.num_copies,
        config.intermediate_size * plan.num_mlp_copies,
    )
    return all(width % _WIDTH_UNIT == 0 for width in widths)
