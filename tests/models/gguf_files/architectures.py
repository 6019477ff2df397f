"""What the file of each architecture contains: metadata, tensor names, and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY_SIZE = 320

# Metadata of every architecture, without the architecture's prefix.
COMMON: Mapping[str, Any] = {
    "context_length": 1024,
    "embedding_length": 128,
    "block_count": 3,
    "feed_forward_length": 192,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": VOCABULARY_SIZE,
}
_HEADS = {"attention.key_length": 32, "attention.value_length": 32}
_ROTATED = {"rope.dimension_count": 32}
_LAYER_NORMS = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
_WIDE = {"feed_forward_length": 512}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_EXPERT_WIDTH = {"expert_feed_forward_length": 96}


class Sizes:
    """The sizes of one layer, as its metadata says."""

    def __init__(self, keys: Mapping[str, Any], layer: int):
        def get(name: str, default: Any = 0) -> Any:
            value = keys.get(name, default)
            return value[layer] if isinstance(value, list) else value

        self.layer = layer
        self.hidden: int = get("embedding_length")
        self.value_heads: int = get("ssm.time_step_rank")
        self.key_heads: int = get("ssm.group_count")
        self.heads: int = get("attention.head_count")
        self.kv_heads: int = get("attention.head_count_kv", self.heads)
        slides = get("attention.sliding_window_pattern") is True
        suffix = "_swa" if slides and "attention.key_length_swa" in keys else ""
        self.key: int = get(f"attention.key_length{suffix}", self.hidden // self.heads)
        self.value: int = get(f"attention.value_length{suffix}", self.hidden // self.heads)
        self.inner: int = get("feed_forward_length")
        self.experts: int = get("expert_count")
        self.is_dense = layer < get("leading_dense_block_count")
        split = self.inner // (get("expert_used_count") or 1)
        self.expert_inner: int = get("expert_feed_forward_length", split)
        self.shared_inner: int = get(
            "expert_shared_feed_forward_length",
            self.expert_inner if get("expert_shared_count") else self.inner,
        )
        self.per_layer: int = get("embedding_length_per_layer_input")
        self.rows_qkv = self.heads * self.key + self.kv_heads * (self.key + self.value)


def _experts(s: Sizes, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp.weight": (s.experts, s.hidden),
        "ffn_gate_exps.weight": (s.experts, inner, s.hidden),
        "ffn_up_exps.weight": (s.experts, inner, s.hidden),
        "ffn_down_exps.weight": (s.experts, s.hidden, inner),
    }


def _gated(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate.weight": (s.inner, s.hidden),
        "ffn_up.weight": (s.inner, s.hidden),
        "ffn_down.weight": (s.hidden, s.inner),
    }


def _shared_experts(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_shexp.weight": (s.shared_inner, s.hidden),
        "ffn_up_shexp.weight": (s.shared_inner, s.hidden),
        "ffn_down_shexp.weight": (s.hidden, s.shared_inner),
    }


def _chosen_experts(s: Sizes) -> dict[str, tuple[int, ...]]:
    """Experts with a bias that chooses them, after dense layers."""
    if s.is_dense:
        return _gated(s)
    return {**_experts(s, s.expert_inner), "exp_probs_b.bias": (s.experts,)}


def _attention(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q.weight": (s.heads * s.key, s.hidden),
        "attn_k.weight": (s.kv_heads * s.key, s.hidden),
        "attn_v.weight": (s.kv_heads * s.value, s.hidden),
        "attn_q_norm.weight": (s.key,),
        "attn_k_norm.weight": (s.key,),
        "attn_output.weight": (s.hidden, s.heads * s.value),
    }


def _latent_queries(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q_a.weight": (48, s.hidden),
        "attn_q_a_norm.weight": (48,),
        "attn_q_b.weight": (s.heads * 48, 48),
    }


def _latents(s: Sizes) -> dict[str, tuple[int, ...]]:
    """Keys of 32 + 16 numbers and values of 24, from latent vectors of 64."""
    return {
        "attn_kv_a_mqa.weight": (64 + 16, s.hidden),
        "attn_kv_a_norm.weight": (64,),
        "attn_k_b.weight": (s.heads, 64, 32),
        "attn_v_b.weight": (s.heads, 24, 64),
        "attn_output.weight": (s.hidden, s.heads * 24),
    }


def _plain_attention(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in _attention(s).items() if "norm" not in name}


def _gated_attention(s: Sizes) -> dict[str, tuple[int, ...]]:
    """Rows of queries are followed by those of their head's gate."""
    return {**_attention(s), "attn_q.weight": (2 * s.heads * s.key, s.hidden)}


def _delta_net(s: Sizes) -> dict[str, Any]:
    """A gated delta net with keys and values of 32."""
    keys, values = 32 * s.key_heads, 32 * s.value_heads
    return {
        "attn_qkv.weight": (2 * keys + values, s.hidden),
        "attn_gate.weight": (values, s.hidden),
        "ssm_beta.weight": (s.value_heads, s.hidden),
        "ssm_alpha.weight": (s.value_heads, s.hidden),
        "ssm_conv1d.weight": (2 * keys + values, 4),
        "ssm_dt.bias": (s.value_heads,),
        "ssm_a": [-0.1 * (1 + head) for head in range(s.value_heads)],
        "ssm_norm.weight": (32,),
        "ssm_out.weight": (s.hidden, values),
    }


def _grouped_delta_net(s: Sizes) -> dict[str, Any]:
    """The same with the projections of betas and steps in one tensor."""
    separate = ("ssm_beta.weight", "ssm_alpha.weight")
    rest = {name: shape for name, shape in _delta_net(s).items() if name not in separate}
    return {**rest, "ssm_ba.weight": (2 * s.value_heads, s.hidden)}


def _mamba(s: Sizes) -> dict[str, Any]:
    """Mamba-2 with 8 heads, an inner size of twice the hidden size, and two groups of 16."""
    inner, channels = 2 * s.hidden, 2 * s.hidden + 2 * 2 * 16
    return {
        "ssm_in.weight": (inner + channels + 8, s.hidden),
        "ssm_conv1d.weight": (channels, 4),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (8,),
        "ssm_a": [[-0.1 * (1 + head)] for head in range(8)],
        "ssm_d": (8, 1),
        "ssm_norm.weight": (2, inner // 2),
        "ssm_out.weight": (s.hidden, inner),
    }


def _nemotron_block(s: Sizes) -> dict[str, Any]:
    """A layer of attention, of Mamba-2, or a feed-forward block."""
    if s.kv_heads:
        return _plain_attention(s)
    if not s.inner:
        return _mamba(s)
    if not s.experts:
        return {name: shape for name, shape in _gated(s).items() if "gate" not in name}
    own = {**_experts(s, s.expert_inner), **_shared_experts(s), "exp_probs_b.bias": (s.experts,)}
    return {name: shape for name, shape in own.items() if name[:9] not in ("ffn_gate_",)} | {
        "ffn_gate_inp.weight": (s.experts, s.hidden)
    }


def _short_convolution(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "shortconv.conv.weight": (s.hidden, 3),
        "shortconv.in_proj.weight": (3 * s.hidden, s.hidden),
        "shortconv.out_proj.weight": (s.hidden, s.hidden),
    }


# Tensors of a layer, by what they are for. Shapes are those of PyTorch: rows, then columns.
PARTS: Mapping[str, Callable[[Sizes], dict[str, tuple[int, ...]]]] = {
    "attn_norm": lambda s: {"attn_norm.weight": (s.hidden,)},
    "ffn_norm": lambda s: {"ffn_norm.weight": (s.hidden,)},
    "attn_norm_bias": lambda s: {"attn_norm.bias": (s.hidden,)},
    "ffn_norm_bias": lambda s: {"ffn_norm.bias": (s.hidden,)},
    "post_attention_norm": lambda s: {"post_attention_norm.weight": (s.hidden,)},
    "post_ffw_norm": lambda s: {"post_ffw_norm.weight": (s.hidden,)},
    "qkv": lambda s: {
        "attn_q.weight": (s.heads * s.key, s.hidden),
        "attn_k.weight": (s.kv_heads * s.key, s.hidden),
        "attn_v.weight": (s.kv_heads * s.value, s.hidden),
    },
    "qkv_bias": lambda s: {
        "attn_q.bias": (s.heads * s.key,),
        "attn_k.bias": (s.kv_heads * s.key,),
        "attn_v.bias": (s.kv_heads * s.value,),
    },
    "fused_qkv": lambda s: {"attn_qkv.weight": (s.rows_qkv, s.hidden)},
    "fused_qkv_bias": lambda s: {"attn_qkv.bias": (s.rows_qkv,)},
    "attn_output": lambda s: {"attn_output.weight": (s.hidden, s.heads * s.value)},
    "attn_output_bias": lambda s: {"attn_output.bias": (s.hidden,)},
    "attn_sinks": lambda s: {"attn_sinks.weight": (s.heads,)},
    "head_norms": lambda s: {"attn_q_norm.weight": (s.key,), "attn_k_norm.weight": (s.key,)},
    "norms_of_all_heads": lambda s: {
        "attn_q_norm.weight": (s.heads * s.key,),
        "attn_k_norm.weight": (s.kv_heads * s.key,),
    },
    "gated": _gated,
    "fused_gated": lambda s: {
        "ffn_up.weight": (2 * s.inner, s.hidden),
        "ffn_down.weight": (s.hidden, s.inner),
    },
    "plain": lambda s: {
        "ffn_up.weight": (s.inner, s.hidden),
        "ffn_down.weight": (s.hidden, s.inner),
    },
    "plain_bias": lambda s: {"ffn_up.bias": (s.inner,), "ffn_down.bias": (s.hidden,)},
    "experts": lambda s: _experts(s, s.expert_inner),
    "whole_experts": lambda s: _experts(s, s.inner),
    "expert_bias": lambda s: {
        "ffn_gate_inp.bias": (s.experts,),
        "ffn_gate_exps.bias": (s.experts, s.expert_inner),
        "ffn_up_exps.bias": (s.experts, s.expert_inner),
        "ffn_down_exps.bias": (s.experts, s.hidden),
    },
    "shared_expert": lambda s: {
        "ffn_gate_inp_shexp.weight": (s.hidden,),
        **_shared_experts(s),
    },
    "chosen_experts": _chosen_experts,
    "shared_experts": lambda s: {} if s.is_dense else _shared_experts(s),
    "operator": lambda s: _attention(s) if s.kv_heads else _short_convolution(s),
    "delta": lambda s: _gated_attention(s) if (s.layer + 1) % 4 == 0 else _delta_net(s),
    "grouped_delta": lambda s: (
        _gated_attention(s) if (s.layer + 1) % 4 == 0 else _grouped_delta_net(s)
    ),
    "latent_queries": _latent_queries,
    "latents": _latents,
    "nemotron_block": _nemotron_block,
    "mixer": lambda s: _plain_attention(s) if s.kv_heads else _mamba(s),
    "per_layer_input": lambda s: {
        "inp_gate.weight": (s.per_layer, s.hidden),
        "proj.weight": (s.hidden, s.per_layer),
        "post_norm.weight": (s.hidden,),
        "layer_output_scale.weight": (1,),
    },
}


@dataclass(frozen=True)
class Architecture:
    """Contents of the base file.

    Attributes:
        parts: Names of ``PARTS``, for every layer.
        keys: Metadata beside or instead of ``COMMON``; ``None`` leaves a key out.
        tensors: Tensors beside or instead of the embedding, the last norm and the head, as in
            :class:`~.case.Case`.
        sizes: How large a tensor's numbers are, where it is not usual.
    """

    parts: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)


_TIED = {"output.weight": None}
_ROWS = COMMON["embedding_length"]
# Gemma multiplies embeddings by the root of their size. With usual ones, the tied head would mostly
# repeat the last token.
_GEMMA_SIZES = {"token_embd": 0.5, "output_norm": 4.0}
_NORM_BIAS = {"output_norm.bias": (_ROWS,)}
_LLAMA = "attn_norm qkv attn_output ffn_norm gated"
_GEMMA = "attn_norm qkv attn_output post_attention_norm ffn_norm gated post_ffw_norm"
_WITH_LAYER_NORMS = "attn_norm attn_norm_bias qkv attn_output ffn_norm ffn_norm_bias"
# Full layers have larger heads than sliding ones.
_GEMMA4 = {
    "block_count": 4,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
    "attention.sliding_window": 64,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 32,
}

_DELTA_NET = {
    **_HEADS,
    "block_count": 4,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 4,
}

_NEMOTRON_H = {
    **_HEADS,
    "block_count": 5,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "feed_forward_length": [0, 192, 0, 192, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.inner_size": 256,
    "ssm.time_step_rank": 8,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_LLAMA, _ROTATED),
    "mistral3": Architecture(_LLAMA, {**_HEADS, **_ROTATED}),
    "granite": Architecture(_LLAMA, {**_ROTATED, "logit_scale": 2.0}),
    "lfm2": Architecture(
        "attn_norm operator ffn_norm gated",
        {"block_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
        {**_TIED, "output_norm.weight": None, "token_embd_norm.weight": (_ROWS,)},
        {"token_embd": 0.5, "token_embd_norm": 4.0},
    ),
    "granitehybrid": Architecture(
        "attn_norm mixer ffn_norm gated",
        {
            **_ROTATED,
            "attention.head_count_kv": [0, 2, 0],
            "logit_scale": 2.0,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.inner_size": 256,
            "ssm.time_step_rank": 8,
        },
    ),
    "qwen35": Architecture("attn_norm delta post_attention_norm gated", _DELTA_NET),
    "qwen35moe": Architecture(
        "attn_norm delta post_attention_norm experts shared_expert",
        {
            **_DELTA_NET,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "qwen3next": Architecture(
        "attn_norm grouped_delta post_attention_norm experts shared_expert",
        {
            **{name: value for name, value in _DELTA_NET.items() if "sections" not in name},
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "granitemoe": Architecture(
        "attn_norm qkv attn_output ffn_norm whole_experts",
        {**_ROTATED, **_EXPERTS, "logit_scale": 2.0},
    ),
    "lfm2moe": Architecture(
        "attn_norm operator ffn_norm chosen_experts",
        {
            "block_count": 4,
            "attention.head_count_kv": [0, 2, 0, 2],
            "shortconv.l_cache": 3,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        {**_TIED, "output_norm.weight": None, "token_embd_norm.weight": (_ROWS,)},
        {"token_embd": 0.5, "token_embd_norm": 4.0},
    ),
    "nemotron_h": Architecture("attn_norm nemotron_block", _NEMOTRON_H),
    "nemotron_h_moe": Architecture(
        "attn_norm nemotron_block",
        {
            **_NEMOTRON_H,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
    ),
    "olmoe": Architecture(
        "attn_norm qkv norms_of_all_heads attn_output ffn_norm whole_experts",
        {**_EXPERTS, "attention.head_count_kv": 4},
    ),
    "minimax-m2": Architecture(
        "attn_norm qkv norms_of_all_heads attn_output ffn_norm chosen_experts",
        {
            **_HEADS,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "feed_forward_length": 96,
            "rope.dimension_count": 16,
            "expert_gating_func": 2,
        },
    ),
    "glm4moe": Architecture(
        "attn_norm qkv attn_output post_attention_norm chosen_experts shared_experts",
        {
            **_HEADS,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "rope.dimension_count": 16,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": None,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
    ),
    "deepseek2": Architecture(
        "attn_norm latent_queries latents ffn_norm chosen_experts shared_experts",
        {
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 48,
            "attention.kv_lora_rank": 64,
            "attention.key_length": 64 + 16,
            "attention.value_length": 64,
            "attention.key_length_mla": 32 + 16,
            "attention.value_length_mla": 24,
            "rope.dimension_count": 16,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
    ),
    "ernie4_5-moe": Architecture(
        "attn_norm qkv attn_output ffn_norm chosen_experts shared_experts",
        {
            **_HEADS,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 192,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "smollm3": Architecture(_LLAMA, {**_ROTATED, "block_count": 5}),
    "qwen2": Architecture(f"{_LLAMA} qkv_bias"),
    "qwen3": Architecture(f"{_LLAMA} head_norms", _HEADS),
    "qwen2moe": Architecture(
        "attn_norm qkv qkv_bias attn_output ffn_norm experts shared_expert",
        {**_EXPERTS, **_EXPERT_WIDTH, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3moe": Architecture(
        "attn_norm qkv head_norms attn_output ffn_norm experts",
        {**_HEADS, **_EXPERTS, **_EXPERT_WIDTH},
    ),
    "gemma": Architecture(_LLAMA, _HEADS, _TIED, _GEMMA_SIZES),
    "gemma2": Architecture(_GEMMA, {**_HEADS, "block_count": 4}, _TIED, _GEMMA_SIZES),
    "gemma3": Architecture(
        f"{_GEMMA} head_norms", {**_HEADS, "block_count": 6}, _TIED, _GEMMA_SIZES
    ),
    "gemma4": Architecture(
        f"{_GEMMA} head_norms per_layer_input",
        _GEMMA4,
        {
            **_TIED,
            "per_layer_token_embd.weight": (VOCABULARY_SIZE, 4 * 32),
            "per_layer_model_proj.weight": (4 * 32, _ROWS),
            "per_layer_proj_norm.weight": (32,),
            # A quarter of the full layers' pairs is rotated.
            "rope_freqs.weight": [1.0] * 8 + [1e30] * 24,
        },
        # Scores are not divided by the root of the head size.
        {**_GEMMA_SIZES, "attn_q_norm": 0.6, "attn_k_norm": 0.6, "per_layer_token_embd": 1.3},
    ),
    "phi3": Architecture("attn_norm fused_qkv attn_output ffn_norm fused_gated", _ROTATED),
    "olmo2": Architecture(
        "qkv norms_of_all_heads attn_output post_attention_norm gated post_ffw_norm",
        {"block_count": 5},
    ),
    "gpt-oss": Architecture(
        "attn_norm qkv qkv_bias attn_output attn_output_bias attn_sinks post_attention_norm"
        " experts expert_bias",
        {
            **_HEADS,
            **_ROTATED,
            **_EXPERTS,
            **_EXPERT_WIDTH,
            "attention.sliding_window": 64,
            "rope.freq_base": 150000.0,
        },
    ),
    "glm4": Architecture(
        "attn_norm qkv attn_output post_attention_norm ffn_norm fused_gated post_ffw_norm",
        {"rope.dimension_count": 16},
    ),
    "exaone4": Architecture(
        "qkv head_norms attn_output post_attention_norm gated post_ffw_norm", _HEADS
    ),
    "seed_oss": Architecture("attn_norm qkv attn_output post_attention_norm gated", _HEADS),
    "hunyuan-dense": Architecture(f"{_LLAMA} head_norms", _HEADS),
    "ernie4_5": Architecture(_LLAMA, _HEADS),
    "stablelm": Architecture(
        f"{_WITH_LAYER_NORMS} gated", {**_LAYER_NORMS, "rope.dimension_count": 8}, _NORM_BIAS
    ),
    "starcoder2": Architecture(
        f"{_WITH_LAYER_NORMS} qkv_bias attn_output_bias plain plain_bias", _LAYER_NORMS, _NORM_BIAS
    ),
    "nemotron": Architecture(
        f"{_WITH_LAYER_NORMS} plain", {**_LAYER_NORMS, "rope.dimension_count": 16}, _NORM_BIAS
    ),
    "falcon": Architecture(
        "attn_norm attn_norm_bias fused_qkv attn_output plain",
        {**_LAYER_NORMS, **_WIDE, "attention.head_count_kv": 1},
        _NORM_BIAS,
    ),
    "gpt2": Architecture(
        "attn_norm attn_norm_bias fused_qkv fused_qkv_bias attn_output attn_output_bias"
        " ffn_norm ffn_norm_bias plain plain_bias",
        {**_LAYER_NORMS, **_WIDE, "attention.head_count_kv": None},
        {**_NORM_BIAS, "position_embd.weight": (COMMON["context_length"], _ROWS)},
    ),
    "bloom": Architecture(
        "attn_norm attn_norm_bias fused_qkv fused_qkv_bias attn_output attn_output_bias"
        " ffn_norm ffn_norm_bias plain plain_bias",
        {**_LAYER_NORMS, **_WIDE, "attention.head_count_kv": None},
        {
            **_NORM_BIAS,
            **_TIED,
            "token_embd_norm.weight": (_ROWS,),
            "token_embd_norm.bias": (_ROWS,),
        },
    ),
}


def contents(
    architecture: str, changed: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a case.

    Args:
        architecture: A name of ``ARCHITECTURES``.
        changed: Metadata without prefix, as in :class:`~.case.Case`.
        tensors: Changed tensors, as in :class:`~.case.Case`.

    Returns:
        The architecture's metadata without its prefix; and each tensor's shape as a tuple, or its
        numbers as a list.
    """
    base = ARCHITECTURES[architecture]
    keys = {**COMMON, **base.keys, **changed}
    keys = {name: value for name, value in keys.items() if value is not None}
    hidden, num_layers = keys["embedding_length"], keys["block_count"]
    found: dict[str, Any] = {
        "token_embd.weight": (VOCABULARY_SIZE, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (VOCABULARY_SIZE, hidden),
    }
    for layer in range(num_layers):
        sizes = Sizes(keys, layer)
        for part in base.parts.split():
            for name, shape in PARTS[part](sizes).items():
                found[f"blk.{layer}.{name}"] = shape
    for pattern, value in {**base.tensors, **tensors}.items():
        repeated = range(num_layers) if "*" in pattern else range(1)
        found |= {pattern.replace("*", str(layer)): value for layer in repeated}
    return keys, {name: value for name, value in found.items() if value is not None}
