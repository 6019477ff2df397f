"""The architectures of GGUF files that are served, and what each key means for them.

The meanings are llama.cpp's, which computes a file as its metadata says, by architecture. Keys that
llama.cpp does not read for an architecture have no effect here either, and are listed with the
reason. Any other key, and any other tensor, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftwise.checkpoints.gguf import delta_net
from draftwise.checkpoints.gguf import gemma_settings as gemmas
from draftwise.checkpoints.gguf import latent_attention as latent
from draftwise.checkpoints.gguf import mixture_settings as mixtures
from draftwise.checkpoints.gguf import model_settings as models
from draftwise.checkpoints.gguf import parameter_names as names
from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.rotary import FREQUENCIES, LONG, ROTARY_TENSORS, SHORT
from draftwise.checkpoints.gguf.shared_settings import (
    WINDOWS,
    Settings,
    Shape,
    attention_bias,
    no_window,
)

QKV = ("attn_q", "attn_k", "attn_v")
_QKV = frozenset(QKV)


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        model_type: that of the configuration; ``settings`` may choose another one.
        settings: the configuration beside what all architectures have.
        modules: names of the tensors of modules.
        epsilon: name of the norms' epsilon in the configuration.
        has_layer_norms: whether the norms subtract the mean; the key of their epsilon is another.
        ignored: keys without effect, and why.
        rotary_tensors: tensors of the rotary embedding that it may have.
        rotates_part: whether only the first numbers of a head may be rotated.
        has_free_heads: whether heads may have another size than hidden size / heads.
        head_size: numbers of a head, where other keys say it than usually.
        head: whether the output projection has its own tensor; ``None`` if it may.
        is_permuted: whether rows of queries and keys that are rotated together are stored next to
            each other, and not half a head apart.
        adds_one: whether norms are stored with 1 added.
        joined: parameters that are not the weight or bias of one tensor.
        joined_by: further ones, which depend on the metadata.
        optional_biases: tensors whose bias counts as zero if it is missing.
        unused: tensors that a file may have although the model does not use them.
        has_mtp: whether the last blocks may be those of MTP layers, which the model does not use.
        mtp_copies: tensors of an MTP layer that are copies of the model's embedding and projection.
    """

    model_type: str
    settings: Callable[[Metadata, Shape], Settings] = lambda metadata, shape: {}
    modules: Mapping[str, str] = field(default_factory=lambda: names.LLAMA)
    epsilon: str = "rms_norm_eps"
    has_layer_norms: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)
    rotary_tensors: frozenset[str] = frozenset()
    rotates_part: bool = False
    has_free_heads: bool = False
    head_size: Callable[[Metadata], int] | None = None
    head: bool | None = None
    is_permuted: bool = False
    adds_one: bool = False
    joined: Mapping[str, names.Joined] = field(default_factory=dict)
    joined_by: Callable[[Metadata], Mapping[str, names.Joined]] = lambda metadata: {}
    optional_biases: frozenset[str] = _QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    unused: Callable[[Metadata], Iterable[str]] = lambda metadata: ()
    has_mtp: bool = False
    mtp_copies: frozenset[str] = frozenset()


_UNREAD = "llama.cpp does not read it for this architecture"
_ROUTING = "llama.cpp routes this architecture in one way"

# Without effect everywhere.
IGNORED: Mapping[str, str] = {
    "vocab_size": "the rows of the embedding are counted",
    "tensor_data_layout": "where old files came from",
    "rope.scaling.finetuned": "only Granite reads it",
    "rope.scaling.yarn_ext_factor": _UNREAD,
    "rope.scaling.yarn_attn_factor": _UNREAD,
    "rope.scaling.yarn_beta_fast": _UNREAD,
    "rope.scaling.yarn_beta_slow": _UNREAD,
    "rope.scaling.yarn_log_multiplier": _UNREAD,
    "attention.layer_norm_epsilon": "the norms have another key",
    "attention.layer_norm_rms_epsilon": "the norms have another key",
}
# Values that leave the model as it is.
WITHOUT_EFFECT: Mapping[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
}
_LLAMA_UNREAD = {
    **dict.fromkeys(
        (
            "attention.scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        _UNREAD,
    ),
    **dict.fromkeys(
        (
            "expert_weights_norm",
            "expert_weights_scale",
            "expert_gating_func",
            "expert_feed_forward_length",
        ),
        _ROUTING,
    ),
}
_EXPERTS_UNREAD = {"expert_weights_norm": _ROUTING, "expert_weights_scale": _ROUTING}
_ROUTER_UNREAD = {**_EXPERTS_UNREAD, "expert_gating_func": _ROUTING}

_QWEN35 = Architecture(
    "qwen3_5_text",
    delta_net.qwen35,
    names.QWEN35,
    rotates_part=True,
    has_free_heads=True,
    adds_one=True,
    joined_by=delta_net.in_turn,
    has_mtp=True,
)
_QWEN35_MOE = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    settings=delta_net.qwen35moe,
    ignored=_EXPERTS_UNREAD,
    joined=names.EXPERTS,
)
_NEMOTRON_H = Architecture(
    "nemotron_h",
    mixtures.nemotron_h,
    names.NEMOTRON_H,
    "layer_norm_epsilon",
    ignored={"expert_gating_func": _ROUTING, "expert_shared_count": _ROUTING},
    has_free_heads=True,
    joined=names.NEMOTRON_PARTS,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        models.llama,
        ignored={**WINDOWS, **_LLAMA_UNREAD},
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
        joined=names.EXPERTS,
    ),
    "mistral3": Architecture(
        "ministral3",
        models.mistral3,
        ignored={**WINDOWS, "attention.scale": _UNREAD},
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
    ),
    "granite": Architecture(
        "granite",
        models.granite,
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
    ),
    "lfm2": Architecture(
        "lfm2", models.lfm2, names.LFM2, "norm_eps", joined=names.LFM2_CONVOLUTION
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        mixtures.lfm2moe,
        names.LFM2_MOE,
        "norm_eps",
        ignored=_EXPERTS_UNREAD,
        joined=names.LFM2_EXPERTS,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        mixtures.granite_hybrid,
        names.GRANITE_HYBRID,
        ignored=_ROUTER_UNREAD,
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
        joined={**names.GRANITE_MAMBA, **names.GRANITE_EXPERTS},
        joined_by=mixtures.granite_shared,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        mixtures.granitemoe,
        names.GRANITE_HYBRID,
        ignored=_ROUTER_UNREAD,
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
        joined=names.GRANITE_EXPERTS,
        joined_by=mixtures.granite_shared,
    ),
    "smollm3": Architecture("smollm3", models.smollm3, has_free_heads=True, is_permuted=True),
    "qwen2": Architecture("qwen2", no_window, ignored=WINDOWS),
    "qwen3": Architecture("qwen3", models.qwen3, ignored=WINDOWS, has_free_heads=True),
    "qwen2moe": Architecture(
        "qwen2_moe",
        models.qwen2moe,
        ignored={**WINDOWS, **_EXPERTS_UNREAD},
        head=True,
        joined=names.EXPERTS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        models.qwen3moe,
        ignored={
            **WINDOWS,
            **_EXPERTS_UNREAD,
            "leading_dense_block_count": _ROUTING,
            "expert_shared_count": _ROUTING,
        },
        has_free_heads=True,
        joined=names.EXPERTS,
    ),
    "olmoe": Architecture(
        "olmoe", mixtures.olmoe, ignored=_ROUTER_UNREAD, head=True, joined=names.EXPERTS
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        mixtures.minimax_m2,
        ignored={**_EXPERTS_UNREAD, "expert_feed_forward_length": _ROUTING},
        rotates_part=True,
        has_free_heads=True,
        joined=names.MINIMAX_EXPERTS,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE,
        model_type="qwen3_next",
        settings=delta_net.qwen3next,
        joined_by=delta_net.in_groups,
    ),
    "gemma": Architecture("gemma", gemmas.gemma, has_free_heads=True, head=False, adds_one=True),
    "gemma2": Architecture(
        "gemma2", gemmas.gemma2, names.GEMMA, has_free_heads=True, head=False, adds_one=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        gemmas.gemma3,
        names.GEMMA,
        ignored={"attn_logit_softcapping": _UNREAD, "attention.scale": _UNREAD},
        has_free_heads=True,
        adds_one=True,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        gemmas.gemma4,
        names.GEMMA4,
        rotary_tensors=frozenset({FREQUENCIES}),
        has_free_heads=True,
        joined=names.GEMMA4_EXPERTS,
        unused=gemmas.unused_by_shared_layers,
    ),
    "phi3": Architecture(
        "phi3",
        no_window,
        ignored=WINDOWS,
        rotary_tensors=frozenset({LONG, SHORT}),
        rotates_part=True,
    ),
    "olmo2": Architecture("olmo2", models.olmo2, names.POST_NORMS, head=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        models.gpt_oss,
        names.GPT_OSS,
        ignored=_EXPERTS_UNREAD,
        has_free_heads=True,
        head=True,
        joined=names.GPT_OSS_EXPERTS,
        optional_biases=_QKV,
    ),
    "glm4": Architecture(
        "glm4",
        lambda metadata, shape: attention_bias(metadata),
        names.GLM4,
        rotates_part=True,
        has_free_heads=True,
        has_mtp=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        mixtures.glm4moe,
        names.GLM4_MOE,
        rotates_part=True,
        has_free_heads=True,
        joined=names.GLM4_EXPERTS,
        has_mtp=True,
        mtp_copies=frozenset({"nextn.embed_tokens.weight", "nextn.shared_head_head.weight"}),
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        latent.deepseek2,
        names.DEEPSEEK,
        head_size=latent.rotated_size,
        joined=names.GLM4_EXPERTS,
        joined_by=latent.keys_and_values,
    ),
    "exaone4": Architecture(
        "exaone4",
        models.exaone4,
        names.POST_NORMS,
        rotary_tensors=frozenset({FREQUENCIES}),
        has_mtp=True,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        lambda metadata, shape: {**attention_bias(metadata), "attention_out_bias": False},
        names.SEED_OSS,
        has_free_heads=True,
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", models.hunyuan, names.HUNYUAN, has_free_heads=True
    ),
    "ernie4_5": Architecture(
        "ernie4_5",
        lambda metadata, shape: {"use_bias": attention_bias(metadata)["attention_bias"]},
        has_free_heads=True,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        mixtures.ernie4_5_moe,
        names.SHARED_EXPERTS,
        ignored=_ROUTER_UNREAD,
        has_free_heads=True,
        joined=names.ERNIE_EXPERTS,
    ),
    "stablelm": Architecture(
        "stablelm",
        models.stablelm,
        epsilon="layer_norm_eps",
        has_layer_norms=True,
        ignored={"use_parallel_residual": "the tensors of the norms say it"},
        rotates_part=True,
        head=True,
    ),
    "nemotron": Architecture(
        "nemotron",
        models.nemotron,
        epsilon="norm_eps",
        has_layer_norms=True,
        rotates_part=True,
        head=True,
        adds_one=True,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "starcoder2": Architecture(
        "starcoder2",
        models.starcoder2,
        names.STARCODER2,
        "norm_epsilon",
        has_layer_norms=True,
        optional_biases=_QKV,
    ),
    "gpt2": Architecture(
        "gpt2",
        models.gpt2,
        names.GPT2,
        "layer_norm_epsilon",
        has_layer_norms=True,
        joined=names.GPT2_LINEAR,
        optional_biases=frozenset(),
    ),
}
