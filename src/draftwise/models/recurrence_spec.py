"""Layers with a recurrence as data: what the native kernels read of transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn


class RecurrenceKind(StrEnum):
    """What a layer computes between its projections; see ``recurrent_layer.h``."""

    DELTA_NET = "delta net"
    MAMBA2 = "mamba2"
    SHORT_CONVOLUTION = "short convolution"


@dataclass(frozen=True)
class StepSpec:
    """The recurrence of a layer after its convolution.

    The state of a head decays by exp(-rate · s) with s = softplus(step + bias).

    Attributes:
        heads: heads of the state.
        groups: groups of consecutive heads that share keys and queries.
        key_size: numbers of a key.
        value_size: numbers of a value.
        bias: ``[heads]`` float32.
        rate: ``[heads]`` float32, positive.
        limits: limits of s.
        skip: ``[heads]`` float32 factors of the values that are added to the output; ``None`` for
            nothing.
        norm: ``[heads * value_size]`` float32 factors of the normalised output.
        norm_size: numbers that are normalised together.
        epsilon: added to the mean square in the norm.
    """

    heads: int
    groups: int
    key_size: int
    value_size: int
    bias: Tensor
    rate: Tensor
    limits: tuple[float, float]
    skip: Tensor | None
    norm: Tensor
    norm_size: int
    epsilon: float


@dataclass(frozen=True)
class RecurrenceSpec:
    """A layer with a recurrence in place of attention: gated delta net, Mamba-2 or convolution.

    Attributes:
        kind: what it computes.
        taps: ``[width, channels]`` float32 weight of the convolution, the newest input's last.
        tap_bias: ``[channels]`` float32 bias of the convolution; ``None`` for none.
        activation: name of the convolution's activation; ``None`` for none.
        step: the recurrence; ``None`` for a short convolution.
        order: ``[outputs]`` int64 outputs of the input projections in the order of
            ``RecurrentKind``; ``None`` if they have it.
    """

    kind: RecurrenceKind
    taps: Tensor
    tap_bias: Tensor | None
    activation: str | None
    step: StepSpec | None
    order: Tensor | None = None


def recurrence_spec(module: Any) -> RecurrenceSpec:
    """Describe a layer of Qwen3-Next, Qwen3.5, Granite 4-H or LFM2.

    Args:
        module: the module of transformers in place of attention.
    """
    convolution = module.conv1d if hasattr(module, "conv1d") else module.conv
    taps = convolution.weight.detach().float().squeeze(1).T.contiguous()
    bias = None if convolution.bias is None else convolution.bias.detach().float()
    if not hasattr(module, "A_log"):
        return RecurrenceSpec(RecurrenceKind.SHORT_CONVOLUTION, taps, bias, None, None)
    activation = str(module.activation)
    if hasattr(module, "in_proj"):
        return RecurrenceSpec(RecurrenceKind.MAMBA2, taps, bias, activation, _mamba2(module))
    order = _order(module) if hasattr(module, "in_proj_qkvz") else None
    step = _delta_net(module)
    return RecurrenceSpec(RecurrenceKind.DELTA_NET, taps, bias, activation, step, order)


def input_projections(module: Any) -> tuple[nn.Linear, ...]:
    """The linear layers that read the layer's input, in the order of ``RecurrentKind``."""
    if hasattr(module, "in_proj"):
        return (module.in_proj,)
    if hasattr(module, "in_proj_qkvz"):
        return module.in_proj_qkvz, module.in_proj_ba
    return module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a


def _order(module: Any) -> Tensor:
    """Outputs of the projections of Qwen3-Next, which are grouped by key head."""
    keys: int = module.head_k_dim
    repeats: int = module.num_v_heads // module.num_k_heads
    values: int = repeats * module.head_v_dim
    groups = torch.arange(module.num_k_heads).unsqueeze(1)

    def outputs(first: int, group: int, at: int, count: int) -> Tensor:
        return (first + groups * group + at + torch.arange(count)).flatten()

    size, joined = 2 * keys + 2 * values, module.in_proj_qkvz.out_features
    return torch.cat(
        [
            outputs(0, size, 0, keys),
            outputs(0, size, keys, keys),
            outputs(0, size, 2 * keys, values),
            outputs(0, size, 2 * keys + values, values),
            outputs(joined, 2 * repeats, 0, repeats),
            outputs(joined, 2 * repeats, repeats, repeats),
        ]
    )


def _delta_net(module: Any) -> StepSpec:
    heads: int = module.num_v_heads
    return StepSpec(
        heads,
        module.num_k_heads,
        module.head_k_dim,
        module.head_v_dim,
        module.dt_bias.detach().float(),
        module.A_log.detach().float().exp(),
        (0.0, float("inf")),
        None,
        module.norm.weight.detach().float().repeat(heads),
        module.head_v_dim,
        module.norm.variance_epsilon,
    )


def _mamba2(module: Any) -> StepSpec:
    return StepSpec(
        module.num_heads,
        module.n_groups,
        module.ssm_state_size,
        module.head_dim,
        module.dt_bias.detach().float(),
        module.A_log.detach().float().exp(),
        module.time_step_limit,
        module.D.detach().float(),
        module.norm.weight.detach().float(),
        module.norm.group_size,
        module.norm.variance_epsilon,
    )
