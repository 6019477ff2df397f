"""Experts of feed-forward blocks as data: what the native kernels read of transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor, nn


class Scoring(StrEnum):
    """How the outputs of a router become the scores of experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class ExpertBiases(NamedTuple):
    """What is added to the products of experts.

    Attributes:
        router: ``[experts]`` float32.
        gate, up: ``[experts, inner]`` float32.
        down: ``[experts, hidden]`` float32.
    """

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class GateLimits(NamedTuple):
    """The gate of gpt-oss, (up + 1) · gate · sigmoid(slope · gate).

    Attributes:
        limit: the gate is at most this, and the up projection within ± this.
        slope: see above.
    """

    limit: float
    slope: float


@dataclass(frozen=True)
class ExpertsSpec:
    """Experts (Shazeer et al. 2017), of which each token chooses those with the highest scores.

    An expert is a feed-forward block with a gate. The output of a token is the sum of its experts,
    each times its score.

    Attributes:
        module: holds the weights; see :meth:`matrices`. Or what they are made of
            (``stored_experts``).
        inner_size: size of an expert's gate.
        router: ``[experts, hidden]`` float32.
        num_chosen: experts of a token.
        scoring: how the scores are computed.
        correction: ``[experts]`` float32 what is added to the scores by which experts are chosen;
            ``None`` for nothing.
        normalises: whether the scores of a token's experts are divided by their sum.
        scale: factor of the scores after that.
        shared_gate: ``[hidden]`` float32; the sigmoid of its product with a token's row is the
            factor of the feed-forward block that all tokens use. ``None`` for a factor of 1.
        biases: what is added to the products; ``None`` for nothing.
        limits: those of the gate of gpt-oss; ``None`` for the activation of the model.
        is_transposed: whether the weights are ``[experts, inputs, outputs]``, those of gate and up
            projection in turn.
    """

    module: nn.Module
    inner_size: int
    router: Tensor
    num_chosen: int
    scoring: Scoring
    correction: Tensor | None
    normalises: bool
    scale: float
    shared_gate: Tensor | None
    biases: ExpertBiases | None = None
    limits: GateLimits | None = None
    is_transposed: bool = False

    def matrices(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """The gate and up projection ``[inner, hidden]`` and the down projection of an expert."""
        own: Any = self.module
        gate_up, down = own.gate_up_proj[expert].detach(), own.down_proj[expert].detach()
        if self.is_transposed:
            return gate_up.T[::2], gate_up.T[1::2], down.T
        gate, up = gate_up.chunk(2)
        return gate, up, down


def experts_spec(block: Any) -> ExpertsSpec:
    """Describe the experts of a feed-forward block.

    Args:
        block: a module of transformers that has a router and experts.
    """
    module = block.experts
    router = block.gate if hasattr(block, "gate") else block.router
    correction = getattr(router, "e_score_correction_bias", None)
    shared_gate = getattr(block, "shared_expert_gate", None)
    is_transposed = hasattr(module, "limit")  # those of gpt-oss
    return ExpertsSpec(
        module,
        module.down_proj.shape[1 if is_transposed else 2],
        router.weight.detach().float(),
        router.top_k,
        # Families that correct the scores have those of a sigmoid.
        Scoring.SOFTMAX if correction is None else Scoring.SIGMOID,
        None if correction is None else correction.detach().float(),
        # Mixtral has no such setting, and normalises.
        getattr(router, "norm_topk_prob", True),
        getattr(router, "routed_scaling_factor", 1.0),
        None if shared_gate is None else shared_gate.weight.detach().float()[0],
        _biases(module, router) if is_transposed else None,
        GateLimits(module.limit, module.alpha) if is_transposed else None,
        is_transposed,
    )


def _biases(module: Any, router: Any) -> ExpertBiases:
    """Those of gpt-oss, which has the gate and the up projection in turn."""
    gate_up = module.gate_up_proj_bias.detach().float()
    down = module.down_proj_bias.detach().float()
    return ExpertBiases(router.bias.detach().float(), gate_up[:, ::2], gate_up[:, 1::2], down)
