"""The small Llama models that are trained from random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def new_llama(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A model with random weights in float32.

    Every layer starts as the identity, so gradients are well scaled from the first step.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def is_layer_matrix(name: str) -> bool:
    """Whether Muon trains the matrix of this name: those of layers, and not the embedding."""
    return ".layers." in name
