"""An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) as a trained module, and its folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.heads import HeadConfig
from draftwise.distillation.speculators import common_config
from draftwise.distillation.trained_head import MLP, RMSNorm, TrainedHead
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"


class Attention(nn.Module):
    """Projections of the attention of the head's layer, which reads 2 h wide inputs."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class Layer(nn.Module):
    """Modules of the head's decoder layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Eagle3Head(TrainedHead):
    """The trained parameters of a head of EAGLE-3.

    Attributes:
        config: sizes and settings of the head.
    """

    def __init__(self, config: HeadConfig) -> None:
        """Create the head with random weights.

        Raises:
            UnsupportedModelError: the configuration has settings that cannot be trained.
        """
        _check(config)
        super().__init__(config, config.num_states)
        self.config = config
        if config.norm_before_fc:
            self.input_norm = RMSNorm(self.fc.in_features, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_states)
            )
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.initialise()

    @property
    def layer(self) -> Layer:
        """The decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def project(self, states: Tensor) -> Tensor:
        """g = fc(states). ``[…, num_states * target_hidden]`` -> ``[…, hidden]``."""
        config = self.config
        x = states.float()
        if config.norm_before_fc:
            x = self.input_norm(x)
        if config.fc_norm:
            chunks = x.chunk(config.num_states, dim=-1)
            norms = zip(self.fc_norm, chunks, strict=True)
            x = torch.cat([norm(chunk) for norm, chunk in norms], dim=-1)
        projected: Tensor = self.fc(x / self.state_scale)
        return projected

    def enter(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's 2 h wide input and its residual. Both ``[…, hidden]``."""
        normed = self.layer.hidden_norm(g)
        wide = torch.cat([self.layer.input_layernorm(embedded), normed], dim=-1)
        return wide, normed if self.config.norm_before_residual else g.float()

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output before the final norm.

        Args:
            attended: ``[…, num_heads * head_size]`` output of the attention.
            residual: ``[…, hidden]``.
        """
        layer = self.layer
        x = residual + layer.self_attn.o_proj(attended)
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def logits(self, out: Tensor) -> Tensor:
        """``[…, hidden]`` -> ``[…, draft_vocab]``."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits * self.config.logit_scale

    def chained(self, out: Tensor) -> Tensor:
        """What the next step of a chain reads in place of g. ``[…, hidden]``."""
        normed: Tensor = self.norm(out) if self.config.norm_output else out
        return normed


def _check(config: HeadConfig) -> None:
    """Refuse what a served head may have and a trained one may not."""
    for refused, what in (
        (config.num_layers != 1, f"{config.num_layers} layers"),
        (config.activation != "silu", f"the activation {config.activation!r}"),
        (any(config.windows), "a sliding window"),
        (config.hidden_size != config.target_hidden_size, "a hidden size of its own"),
    ):
        if refused:
            raise UnsupportedModelError(_ROLE, f"a head with {what} cannot be trained")


def speculators_config(
    config: HeadConfig, target: str, architectures: list[str], num_speculative_tokens: int
) -> dict[str, Any]:
    """The ``config.json`` of a head.

    Args:
        config: the head's configuration.
        target: name of the target, which the layout calls the verifier.
        architectures: the target's architectures.
        num_speculative_tokens: draft length that the folder proposes.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        **common_config(config, "llama", target, architectures, num_speculative_tokens),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": (
            None if config.state_layers is None else list(config.state_layers)
        ),
        "logit_scale": config.logit_scale,
        "embed_requires_grad": False,
    }
