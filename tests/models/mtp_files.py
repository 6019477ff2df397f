"""GGUF files of tiny models with an MTP layer, as llama.cpp writes them."""

import gguf
import numpy as np
import torch

from ..tiny_mtp import random_layer
from .gguf_files.writing import save
from .passes import random_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
# Families of transformers by architecture, and their settings beside ``SIZES``.
ARCHITECTURES = {
    "qwen35": ("Qwen3_5Text", {}),
    "qwen35moe": ("Qwen3_5MoeText", EXPERTS),
    "qwen3next": ("Qwen3Next", EXPERTS),
    "glm4moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "layer_types": None,
        },
    ),
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "post_norm": "nextn.shared_head_norm",
}


def build(architecture, **changes):
    """A random model and its ``MtpModel``, as transformers computes them."""
    family, settings = ARCHITECTURES[architecture]
    main = random_model(family, **{**SIZES, **settings, **changes})
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    return main, random_layer(main)


def _tiled(tensor, dim, config):
    """Value heads in turn over the key heads, in place of those of a key head together."""
    repeats = config.linear_num_value_heads // config.linear_num_key_heads
    split = tensor.unflatten(dim, (config.linear_num_key_heads, repeats, -1))
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _parted(weight, config):
    """Queries, keys and values, and gates, of the rows of Qwen3-Next's key heads."""
    key, heads = config.linear_key_head_dim, config.linear_num_key_heads
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    *mixed, gates = weight.view(heads, -1, weight.shape[1]).split([key, key, values, values], 1)
    return torch.cat([each.flatten(0, 1) for each in mixed]), gates.flatten(0, 1)


def _layer_tensors(layer, config):
    """Names in a block of a file, and numbers, of the parameters of a layer."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    adds_one = config.model_type.startswith("qwen")

    def in_turn(weight, dim):
        return weight if config.model_type == "qwen3_next" else _tiled(weight, dim, config)

    for name, weight in layer.items():
        module, _, kind = name.rpartition(".")
        if module.endswith(("in_proj_qkv", "conv1d")):
            weight = weight.flatten(1)
            weight = torch.cat([weight[:keys], in_turn(weight[keys:], 0)])
        elif module.endswith(("in_proj_z", "in_proj_b", "in_proj_a")):
            weight = in_turn(weight, 0)
        elif module.endswith("linear_attn.out_proj"):
            weight = in_turn(weight, 1)
        elif adds_one and module.endswith("norm") and not module.endswith("linear_attn.norm"):
            weight = weight + 1
        if module.endswith("in_proj_qkvz"):
            mixed, gates = _parted(weight, config)
            yield "attn_qkv.weight", mixed
            yield "attn_gate.weight", gates
        elif kind == "A_log":
            yield "ssm_a", -in_turn(weight, 0).exp()
        elif kind == "dt_bias":
            yield "ssm_dt.bias", in_turn(weight, 0)
        elif kind == "e_score_correction_bias":
            yield "exp_probs_b.bias", weight
        elif kind == "gate_up_proj":
            gate, up = weight.chunk(2, dim=1)
            yield "ffn_gate_exps.weight", gate
            yield "ffn_up_exps.weight", up
        elif kind == "down_proj":
            yield "ffn_down_exps.weight", weight
        else:
            weight = weight.flatten() if module == "mlp.shared_expert_gate" else weight
            yield f"{_NAMES[module]}.{kind}", weight


def tensors_of(main, layer):
    """All tensors of a file by name; those of the MTP layer follow the model's layers."""
    config, state = main.config, main.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"] + config.model_type.startswith("qwen"),
        "output.weight": state["lm_head.weight"],
    }
    layers = [each.state_dict() for each in main.model.layers]
    own = {name.removeprefix("mtp_block."): x for name, x in layer.layers[0].state_dict().items()}
    for number, each in enumerate([*layers, own]):
        for name, numbers in _layer_tensors(each, config):
            tensors[f"blk.{number}.{name}"] = numbers
    return tensors


def write(path, architecture, config, tensors, blocks=None, **keys):
    """Write a file.

    Args:
        path: where.
        architecture: key of ``ARCHITECTURES``.
        config: the model's configuration.
        tensors: see ``tensors_of``.
        blocks: type of all matrices but those of routers; ``None`` for float32.
        keys: changed metadata of the architecture, with ``_`` for ``.``; ``None`` leaves a key out.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    is_hybrid = architecture != "glm4moe"
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "feed_forward_length": config.intermediate_size
        if architecture in ("qwen35", "glm4moe")
        else None,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.head_dim // (4 if is_hybrid else 2),
    }
    if is_hybrid:
        heads = config.linear_num_value_heads
        own |= {
            "attention.recurrent_layers": [
                each == "linear_attention" for each in [*config.layer_types, "full_attention"]
            ],
            "full_attention_interval": 4,
            "rope.dimension_sections": None if architecture == "qwen3next" else [2, 1, 1, 0],
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * config.linear_value_head_dim,
        }
    if architecture != "qwen35":
        own |= {
            "expert_count": config.num_experts if is_hybrid else config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if architecture in ("qwen35moe", "qwen3next"):
        own["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture == "glm4moe":
        own |= {
            "expert_shared_count": config.n_shared_experts,
            "expert_gating_func": 2,
            "expert_weights_norm": config.norm_topk_prob,
            "leading_dense_block_count": config.first_k_dense_replace,
        }
    for name, value in {**own, **keys}.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{at}" for at in range(3, config.vocab_size))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    for name, tensor in tensors.items():
        numbers = np.ascontiguousarray(tensor.detach().float().numpy())
        is_kept = numbers.ndim < 2 or name.endswith(("conv1d.weight", "ffn_gate_inp.weight"))
        if blocks is None or is_kept:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf.quants.quantize(numbers, blocks), raw_dtype=blocks)
    save(writer)
    return path
