"""An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) as a trained module, and its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwise.checkpoints.heads import HeadConfig
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
# Version of the layout of ``speculators`` that the configuration is written for.
_SPECULATORS_VERSION = "0.3.0"


class RMSNorm(nn.RMSNorm):
    """Root mean square norm, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """``[…, size]`` -> ``[…, size]``."""
        return super().forward(x.float())


class Attention(nn.Module):
    """Projections of the attention of the head's layer, which reads 2 h wide inputs."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class MLP(nn.Module):
    """Gated feed-forward block of Llama."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[…, hidden]`` -> ``[…, hidden]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Modules of the head's decoder layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Eagle3Head(nn.Module):
    """The trained parameters of a head, under the names that its folder has.

    The states of a target differ by orders of magnitude between layers and channels. ``fc`` is
    therefore trained on states divided by ``state_scale``, and :meth:`weights` folds the scale into
    its weight.

    Attributes:
        config: sizes and settings of the head.
        state_scale: ``[num_states * target_hidden]`` root mean square of each channel.
    """

    state_scale: Tensor

    def __init__(self, config: HeadConfig) -> None:
        """Create the head with random weights.

        Raises:
            UnsupportedModelError: the configuration has settings that cannot be trained.
        """
        super().__init__()
        _check(config)
        self.config = config
        num_inputs = config.num_states * config.target_hidden_size
        self.fc = nn.Linear(num_inputs, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_inputs, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_states)
            )
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("state_scale", torch.ones(num_inputs))
        self._rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_size,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # The layer starts as the identity, so gradients are well scaled.
                nn.init.zeros_(parameter)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

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

    @torch.no_grad()
    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary embedding. ``[…]`` -> ``[…, head_size]`` twice."""
        flat = positions.reshape(1, -1)
        cos, sin = self._rotary(torch.zeros((), device=positions.device), flat)
        shape = (*positions.shape, -1)
        return cos.view(shape), sin.view(shape)

    def weights(self) -> dict[str, Tensor]:
        """The weights by the names of the folder, with the scale of the states folded in."""
        found = {name: parameter.detach() for name, parameter in self.named_parameters()}
        found["fc.weight"] = found["fc.weight"] / self.state_scale
        return found

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor], state_scale: Tensor) -> None:
        """Start from the weights of a head, with the given scale of the states."""
        self.state_scale.copy_(state_scale)
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
        self.fc.weight.mul_(self.state_scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding of Llama.

    Args:
        x: ``[…, heads, head_size]``.
        cos: ``[…, head_size]``.
        sin: ``[…, head_size]``.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)


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
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": config.target_vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_size,
            "hidden_act": config.activation,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": dict(config.rope_parameters),
            "rope_theta": config.rope_parameters.get("rope_theta"),
            "max_position_embeddings": config.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": (
            None if config.state_layers is None else list(config.state_layers)
        ),
        "logit_scale": config.logit_scale,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def head_tensors(
    weights: Mapping[str, Tensor], target_ids: Tensor, target_vocab_size: int
) -> dict[str, Tensor]:
    """The tensors of a folder.

    Args:
        weights: weights of the head by name.
        target_ids: ``[draft_vocab]`` the target's ids of the head's tokens.
        target_vocab_size: the target's number of tokens.

    Returns:
        The weights in bfloat16, ``d2t`` ``[draft_vocab]`` with the offset from each token to the
        target's, and ``t2d`` ``[target_vocab]``, which marks the target's tokens. A head of the
        whole vocabulary has neither, as vLLM refuses them there.
    """
    ids = target_ids.cpu()
    tensors = {
        name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()
    }
    if len(ids) == target_vocab_size:
        return tensors
    marked = torch.zeros(target_vocab_size, dtype=torch.bool)
    marked[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": marked}
