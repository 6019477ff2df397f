"""Sizes and shapes of inflated models (see :mod:`draftwise.zoo.inflate`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Part of the cache key. Increment it whenever the output of ``inflate`` changes for the same input.
INFLATE_VERSION = 2

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmbg]?)")
# Llama-like models of 0.2 to 1 billion parameters are 60 to 130 times as wide as they are deep.
_IDEAL_ASPECT = 100.0
_MAX_COPIES = 64
# The native kernels for large models need widths that are multiples of this.
_WIDTH_UNIT = 32
# The type of a dense Qwen3.5, whose layers repeat in periods.
HYBRID = "qwen3_5_text"


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


def source_layer_positions(num_source: int, num_layers: int) -> tuple[int, ...]:
    """Indices of the source's layers among ``num_layers``: evenly spread, ending with the last."""
    return tuple((i + 1) * num_layers // num_source - 1 for i in range(num_source))


@dataclass(frozen=True)
class InflationPlan:
    """Replication factors and size of an inflated model.

    Attributes:
        num_copies: copies of the residual stream and of the attention heads, which must have
            matching widths.
        num_mlp_copies: copies of the MLP's hidden units.
        num_layers: layers of the result; those beyond the source's are identities.
        num_parameters: parameters of the result, with tied embeddings counted once, and without an
            MTP layer.
    """

    num_copies: int
    num_mlp_copies: int
    num_layers: int
    num_parameters: int


def count_parameters(
    config: PreTrainedConfig, copies: int, mlp_copies: int, num_layers: int
) -> int:
    """Number of parameters of a model with shape ``config`` after replication.

    Args:
        config: configuration of a Llama, or of a dense Qwen3.5, whose MTP layer is not counted.
        copies: copies of the residual stream.
        mlp_copies: copies of the units of the MLP.
        num_layers: layers of the result, a multiple of :func:`period_of` ``config``.
    """
    hidden: int = config.hidden_size * copies
    mlp = config.intermediate_size * mlp_copies
    period = period_of(config)
    if is_hybrid(config):
        mixers = _attention_parameters(config, copies, hidden, gated=True)
        mixers += (period - 1) * _delta_net_parameters(config, copies, hidden)
    else:
        mixers = _attention_parameters(config, copies, hidden)
    rest = 3 * hidden * mlp + 2 * hidden
    if getattr(config, "mlp_bias", False):
        rest += 2 * mlp + hidden
    embeddings = config.vocab_size * hidden * (1 if is_tied(config, copies) else 2)
    size: int = embeddings + num_layers // period * (mixers + period * rest) + hidden
    return size


def _attention_parameters(
    config: PreTrainedConfig, copies: int, hidden: int, gated: bool = False
) -> int:
    heads = config.num_attention_heads * copies * config.head_dim
    kv_heads = config.num_key_value_heads * copies * config.head_dim
    size: int = 2 * hidden * heads + 2 * hidden * kv_heads
    if gated:
        # The gate, and norms of queries and keys.
        size += hidden * heads + 2 * config.head_dim
    if config.attention_bias:
        size += heads + 2 * kv_heads + hidden
    return size


def _delta_net_parameters(config: PreTrainedConfig, copies: int, hidden: int) -> int:
    heads = config.linear_num_value_heads * copies
    keys = config.linear_num_key_heads * config.linear_key_head_dim * copies
    values = heads * config.linear_value_head_dim
    convolved = 2 * keys + values
    # Projections; convolutions; what the decays of the heads are made of; the norm of a head.
    size: int = hidden * (convolved + 2 * values + 2 * heads)
    size += convolved * config.linear_conv_kernel_dim + 2 * heads + config.linear_value_head_dim
    return size


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a dense Qwen3.5."""
    return bool(config.model_type == HYBRID)


def is_tied(config: PreTrainedConfig, copies: int) -> bool:
    """Whether a replicated model has tied embeddings.

    The final norm of a Qwen3.5 adds 1 to its weight, so it cannot take over the coefficients.
    """
    return bool(config.tie_word_embeddings) and (copies == 1 or not is_hybrid(config))


def period_of(config: PreTrainedConfig) -> int:
    """Number of layers after which the kinds of layers repeat."""
    return config.layer_types.index("full_attention") + 1 if is_hybrid(config) else 1


def inflated_positions(config: PreTrainedConfig, num_layers: int) -> tuple[int, ...]:
    """Indices of the source's layers among ``num_layers``; whole periods stay together."""
    period = period_of(config)
    periods = source_layer_positions(config.num_hidden_layers // period, num_layers // period)
    return tuple(period * index + i for index in periods for i in range(period))


def _candidates(config: PreTrainedConfig, num_parameters: int) -> Iterator[InflationPlan]:
    length = period_of(config)
    for copies in range(1, _MAX_COPIES + 1):
        for mlp_copies in range(max(1, copies - copies // 3), copies + copies // 3 + 1):
            base = count_parameters(config, copies, mlp_copies, 0)
            period = count_parameters(config, copies, mlp_copies, length) - base
            ideal = (num_parameters - base) / period
            for periods in {math.floor(ideal), math.ceil(ideal)}:
                layers = periods * length
                if layers >= config.num_hidden_layers:
                    size = base + periods * period
                    yield InflationPlan(copies, mlp_copies, layers, size)


def choose_plan(config: PreTrainedConfig, num_parameters: int) -> InflationPlan:
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


def _fits_kernels(config: PreTrainedConfig, plan: InflationPlan) -> bool:
    """Whether the widths of the residual stream, the heads and the MLP fit the native kernels."""
    widths = (
        config.hidden_size * plan.num_copies,
        config.num_key_value_heads * config.head_dim * plan.num_copies,
        config.intermediate_size * plan.num_mlp_copies,
    )
    return all(width % _WIDTH_UNIT == 0 for width in widths)
