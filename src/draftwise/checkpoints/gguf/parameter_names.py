"""Names of a model's parameters in ``transformers``, and of their tensors in a GGUF file.

``*`` stands for the number of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_MODULES = "model.layers.*."
_TENSORS = "blk.*."

Names = Mapping[str, str]


@dataclass(frozen=True)
class Joined:
    """A parameter that is computed from tensors.

    Attributes:
        tensors: their names.
        join: the computation; ``None`` if the tensors are its rows.
        default: its numbers if the file lacks the tensors; ``None`` if it must have them.
        rows: ``[rows]`` int64, which rows of the tensors, one below the other, in which order;
            ``None`` for all.
        pieces: ``[pieces]`` int64, the order of the equal pieces of each row; ``None`` for that of
            the file.
    """

    tensors: tuple[str, ...]
    join: Callable[..., Tensor] | None = torch.clone
    default: float | None = None
    rows: Tensor | None = None
    pieces: Tensor | None = None

    @staticmethod
    def of_layer(
        *tensors: str,
        join: Callable[..., Tensor] | None = torch.clone,
        default: float | None = None,
        rows: Tensor | None = None,
        pieces: Tensor | None = None,
    ) -> Joined:
        """A parameter of a layer, by the names of the layer's tensors."""
        names = tuple(_TENSORS + tensor for tensor in tensors)
        return Joined(names, join, default, rows, pieces)


def of_layers(names: Names) -> dict[str, str]:
    """Complete the names of a layer's modules and tensors."""
    return {_MODULES + module: _TENSORS + tensor for module, tensor in names.items()}


def by_layer(parameters: Mapping[str, Joined]) -> dict[str, Joined]:
    """Complete the names of a layer's parameters."""
    return {_MODULES + name: joined for name, joined in parameters.items()}


def _side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """``[experts, 2 * inner, hidden]`` of twice ``[experts, inner, hidden]``."""
    return torch.cat([gate, up], dim=1)


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """``[experts, 2 * inner, ...]``: outputs of gate and up projection in turn."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def of_channels(weight: Tensor) -> Tensor:
    """``[channels, 1, width]`` the weight of a convolution of each channel on its own."""
    return weight.unsqueeze(1)


# Modules with a weight, and maybe a bias.
LLAMA: Names = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **of_layers(
        {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "mlp.gate": "ffn_gate_inp",
            "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
            "mlp.shared_expert.up_proj": "ffn_up_shexp",
            "mlp.shared_expert.down_proj": "ffn_down_shexp",
        }
    ),
}
LFM2: Names = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    **of_layers(
        {
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
        }
    ),
}
LFM2_MOE: Names = {**LFM2, **of_layers({"feed_forward.gate": "ffn_gate_inp"})}
LFM2_CONVOLUTION = by_layer(
    {"conv.conv.weight": Joined.of_layer("shortconv.conv.weight", join=of_channels)}
)
GRANITE_HYBRID: Names = {
    **LLAMA,
    **of_layers(
        {
            "mamba.in_proj": "ssm_in",
            "mamba.out_proj": "ssm_out",
            "block_sparse_moe.router": "ffn_gate_inp",
        }
    ),
}


def _mamba_of(module: str) -> dict[str, Joined]:
    """The parameters of Mamba-2 in a module of a layer, beside its projections."""
    return {
        f"{module}.conv1d.weight": Joined.of_layer("ssm_conv1d.weight", join=of_channels),
        f"{module}.conv1d.bias": Joined.of_layer("ssm_conv1d.bias"),
        f"{module}.dt_bias": Joined.of_layer("ssm_dt.bias"),
        f"{module}.A_log": Joined.of_layer("ssm_a", join=lambda a: torch.log(-a.flatten())),
        f"{module}.D": Joined.of_layer("ssm_d", join=torch.flatten),
        f"{module}.norm.weight": Joined.of_layer("ssm_norm.weight", join=torch.flatten),
    }


GRANITE_MAMBA = by_layer(_mamba_of("mamba"))
# Of an MTP layer, beside what other layers have.
MTP: Names = of_layers(
    {
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "eh_proj": "nextn.eh_proj",
        "post_norm": "nextn.shared_head_norm",
    }
)
QWEN35: Names = {
    **LLAMA,
    **of_layers({"post_attention_layernorm": "post_attention_norm"}),
    **MTP,
}


# Norms after attention and feed-forward block only.
POST_NORMS: Names = {
    **LLAMA,
    **of_layers(
        {
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    ),
}
GEMMA: Names = {**POST_NORMS, **of_layers({"pre_feedforward_layernorm": "ffn_norm"})}
GEMMA4: Names = {
    **GEMMA,
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    **of_layers(
        {
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.proj": "ffn_gate_inp",
        }
    ),
}
GLM4: Names = {
    **LLAMA,
    **of_layers(
        {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        }
    ),
}
SEED_OSS: Names = {**LLAMA, **of_layers({"post_attention_layernorm": "post_attention_norm"})}
GPT_OSS: Names = {**SEED_OSS, **of_layers({"mlp.router": "ffn_gate_inp"})}
HUNYUAN: Names = {
    **LLAMA,
    **of_layers(
        {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
    ),
}
STARCODER2: Names = {**LLAMA, **of_layers({"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"})}
_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2: Names = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    **{f"transformer.h.*.{name}": _TENSORS + tensor for name, tensor in _GPT2_LAYER.items()},
}

NEMOTRON_H: Names = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "lm_head": "output",
    **of_layers(
        {
            "norm": "attn_norm",
            "mixer.in_proj": "ssm_in",
            "mixer.out_proj": "ssm_out",
            "mixer.q_proj": "attn_q",
            "mixer.k_proj": "attn_k",
            "mixer.v_proj": "attn_v",
            "mixer.o_proj": "attn_output",
            "mixer.up_proj": "ffn_up",
            "mixer.down_proj": "ffn_down",
            "mixer.gate": "ffn_gate_inp",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
            "mixer.fc1_latent_proj": "ffn_latent_down",
            "mixer.fc2_latent_proj": "ffn_latent_up",
        }
    ),
}
# With experts that all tokens read.
SHARED_EXPERTS: Names = {
    **LLAMA,
    **of_layers(
        {f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
    ),
}
GLM4_MOE: Names = {
    **SHARED_EXPERTS,
    **of_layers({"post_attention_layernorm": "post_attention_norm"}),
    **MTP,
}
DEEPSEEK: Names = {
    **SHARED_EXPERTS,
    **of_layers(
        {
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.kv_b_proj": "attn_kv_b",
        }
    ),
}


def _experts_of(module: str) -> dict[str, Joined]:
    """The parameters of the experts in a module of a layer."""
    return {
        f"{module}.experts.gate_up_proj": Joined.of_layer(
            "ffn_gate_exps.weight", "ffn_up_exps.weight", join=_side_by_side
        ),
        f"{module}.experts.down_proj": Joined.of_layer("ffn_down_exps.weight"),
    }


def _choice(
    parameter: str, join: Callable[..., Tensor] = torch.clone, default: float | None = None
) -> dict[str, Joined]:
    """The bias that is added to the scores of experts to choose some of them."""
    return {parameter: Joined.of_layer("exp_probs_b.bias", join=join, default=default)}


# Parameters that are not the weight or bias of one tensor.
EXPERTS = by_layer(
    {
        **_experts_of("mlp"),
        "mlp.shared_expert_gate.weight": Joined.of_layer(
            "ffn_gate_inp_shexp.weight", join=lambda weight: weight.unsqueeze(0)
        ),
    }
)
GLM4_EXPERTS = {**EXPERTS, **by_layer(_choice("mlp.gate.e_score_correction_bias"))}
ERNIE_EXPERTS = {
    **EXPERTS,
    **by_layer(
        _choice("mlp.gate.moe_statics.e_score_correction_bias", lambda bias: bias.unsqueeze(0), 0.0)
    ),
}
MINIMAX_EXPERTS = {**EXPERTS, **by_layer(_choice("mlp.e_score_correction_bias"))}
LFM2_EXPERTS = {
    **LFM2_CONVOLUTION,
    **by_layer({**_experts_of("feed_forward"), **_choice("feed_forward.expert_bias")}),
}
NEMOTRON_PARTS = by_layer(
    {
        **_mamba_of("mixer"),
        "mixer.experts.up_proj": Joined.of_layer("ffn_up_exps.weight"),
        "mixer.experts.down_proj": Joined.of_layer("ffn_down_exps.weight"),
        **_choice("mixer.gate.e_score_correction_bias"),
    }
)
GRANITE_EXPERTS = by_layer(_experts_of("block_sparse_moe"))
GPT_OSS_EXPERTS = by_layer(
    {
        "self_attn.sinks": Joined.of_layer("attn_sinks.weight"),
        "mlp.experts.gate_up_proj": Joined.of_layer(
            "ffn_gate_exps.weight",
            "ffn_up_exps.weight",
            join=lambda gate, up: _interleaved(gate, up).transpose(1, 2),
        ),
        "mlp.experts.gate_up_proj_bias": Joined.of_layer(
            "ffn_gate_exps.bias", "ffn_up_exps.bias", join=_interleaved
        ),
        "mlp.experts.down_proj": Joined.of_layer(
            "ffn_down_exps.weight", join=lambda down: down.transpose(1, 2)
        ),
        "mlp.experts.down_proj_bias": Joined.of_layer("ffn_down_exps.bias"),
    }
)
GEMMA4_EXPERTS = by_layer(
    {
        "layer_scalar": Joined.of_layer("layer_output_scale.weight", default=1.0),
        "router.scale": Joined.of_layer("ffn_gate_inp.scale"),
        "router.per_expert_scale": Joined.of_layer("ffn_down_exps.scale"),
        "experts.gate_up_proj": Joined.of_layer("ffn_gate_up_exps.weight"),
        "experts.down_proj": Joined.of_layer("ffn_down_exps.weight"),
    }
)
# GPT-2's linear layers have the outputs in columns.
GPT2_LINEAR = {
    f"transformer.h.*.{name}.weight": Joined.of_layer(f"{tensor}.weight", join=torch.t)
    for name, tensor in _GPT2_LAYER.items()
    if "." in name
}
