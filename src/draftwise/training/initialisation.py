"""Initial weights of the models that are trained."""

from __future__ import annotations

from torch import nn
from transformers import LlamaForCausalLM


def zero_layer_outputs(model: LlamaForCausalLM) -> None:
    """Let every layer start as the identity, so gradients are well scaled from the first step."""
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
