"""The hybrid of the family: a Qwen3.5 with its MTP layer, which begins with the target's weights.

Three of four layers have a gated delta net (Yang et al. 2024, arXiv:2412.06464) in place of
attention. As in "The Mamba in the Llama" (Wang et al. 2024, arXiv:2408.15237), embeddings,
feed-forward blocks and projections come from a trained model with attention alone, and
distillation repairs what the new layers compute differently.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet

from draftwise.training.mtp import is_mtp_tensor, load_mtp_tensors, mtp_tensors, new_mtp_layer
from draftwise.zoo.inflation_plan import source_layer_positions

_WEIGHTS = "model.safetensors"
# Shortest and longest memory of the heads of a new delta net, in tokens.
_MEMORY = (2.0, 1000.0)


class Hybrid(Qwen3_5ForCausalLM):  # type: ignore[misc]
    """A Qwen3.5 with the layer that predicts a second token.

    Attributes:
        mtp: the layer; ``None`` until it is added.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        """Create a model with random weights, without the MTP layer."""
        super().__init__(config)
        self.mtp: nn.Module | None = None

    def add_mtp(self) -> None:
        """Add a new MTP layer, which begins with weights of the last layer."""
        self.mtp = new_mtp_layer(self)

    def both(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the next token and of the token after it.

        Args:
            tokens: ``[rows, length]``.

        Returns:
            ``[rows, length, vocab]``, and ``[rows, length - 1, vocab]`` from the MTP layer. Its
            position i has read the state of position i and token i + 1.
        """
        assert self.mtp is not None
        states = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        embedded = self.model.embed_tokens(tokens[:, 1:])
        positions = torch.arange(embedded.shape[1], device=tokens.device).unsqueeze(0)
        second = self.mtp(
            embedded,
            states[:, :-1],
            position_embeddings=self.model.rotary_emb(embedded, position_ids=positions),
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
        )
        return self.lm_head(states), self.lm_head(second)


def new_hybrid(config: Qwen3_5TextConfig, seed: int, target: LlamaForCausalLM) -> Hybrid:
    """A hybrid in float32 with the weights of a Llama of the same widths.

    Args:
        config: configuration of the hybrid.
        seed: seed of the weights that are new.
        target: the Llama.
    """
    torch.manual_seed(seed)
    model = Hybrid(config)
    _copy_weights(model, deepcopy(target).float())
    model.add_mtp()
    return model


@torch.no_grad()
def _copy_weights(model: Hybrid, target: LlamaForCausalLM) -> None:
    """Copy what a Llama has in common with a hybrid, and make projections of the rest."""
    own, given = model.model, target.model
    own.embed_tokens.weight.copy_(given.embed_tokens.weight)
    # Norms of Qwen3.5 add 1 to their weights.
    own.norm.weight.copy_(given.norm.weight - 1)
    sources = source_layer_positions(len(own.layers), len(given.layers))
    for layer, index in zip(own.layers, sources, strict=True):
        source = given.layers[index]
        layer.mlp.load_state_dict(source.mlp.state_dict())
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).weight.copy_(getattr(source, name).weight - 1)
        if layer.block_type == "linear_attention":
            _begin_delta_net(layer.linear_attn, source.self_attn)
        else:
            _copy_attention(layer.self_attn, source.self_attn, source.input_layernorm.weight)


def _copy_attention(own: Qwen3_5Attention, given: LlamaAttention, entering: Tensor) -> None:
    """Copy attention. Its gate begins at one half, and norms at the size of queries and keys."""
    size = own.head_dim
    queries = own.q_proj.weight.view(-1, 2, size, own.q_proj.in_features)
    queries[:, 0] = given.q_proj.weight.view(-1, size, own.q_proj.in_features)
    queries[:, 1] = 0
    own.k_proj.weight.copy_(given.k_proj.weight)
    own.v_proj.weight.copy_(given.v_proj.weight)
    own.o_proj.weight.copy_(2 * given.o_proj.weight)
    for norm, projection in ((own.q_norm, given.q_proj), (own.k_norm, given.k_proj)):
        root = (projection.weight * entering).square().sum(dim=1).mean().sqrt()
        norm.weight.fill_(root - 1)


def _begin_delta_net(own: Qwen3_5GatedDeltaNet, given: LlamaAttention) -> None:
    """Begin a delta net as the identity, with the queries, keys and values of attention.

    Each head of queries gets keys and values of its own. The heads differ in how long they
    remember.
    """
    size = own.head_k_dim
    queries = given.q_proj.weight
    repeats = len(queries) // len(given.k_proj.weight)
    keys, values = (
        each.weight.view(-1, size, queries.shape[1]).repeat_interleave(repeats, dim=0).flatten(0, 1)
        for each in (given.k_proj, given.v_proj)
    )
    own.in_proj_qkv.weight.copy_(torch.cat([queries, keys, values]))
    own.conv1d.weight.zero_()
    own.conv1d.weight[:, :, -1] = 1
    own.out_proj.weight.zero_()
    shortest, longest = (torch.tensor(each).log() for each in _MEMORY)
    rates = torch.exp(-torch.linspace(float(shortest), float(longest), own.num_v_heads))
    # The decay is exp(-exp(A_log) softplus(dt_bias)) where the input says nothing.
    own.A_log.zero_()
    own.dt_bias.copy_(rates.expm1().log())


def save_hybrid(model: Hybrid, folder: Path) -> None:
    """Write a folder in the layout of Qwen3.5, with the tensors of the MTP layer."""
    assert model.mtp is not None
    layer, model.mtp = model.mtp, None
    model.save_pretrained(str(folder))
    model.mtp = layer
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    # transformers' own names of what is counted below.
    for name in ("num_mtp_layers", "mtp_layer_types"):
        values.pop(name, None)
    values["architectures"] = [Qwen3_5ForCausalLM.__name__]
    values["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tensors = {**load_file(folder / _WEIGHTS), **mtp_tensors(layer)}
    contiguous = {name: each.contiguous() for name, each in tensors.items()}
    save_file(contiguous, folder / _WEIGHTS, metadata={"format": "pt"})


def load_hybrid(folder: Path, dtype: torch.dtype) -> Hybrid:
    """Read a folder that :func:`save_hybrid` wrote."""
    model: Hybrid = Hybrid.from_pretrained(str(folder), dtype=dtype)
    model.add_mtp()
    assert model.mtp is not None
    tensors = load_file(folder / _WEIGHTS)
    load_mtp_tensors(model.mtp, {n: each for n, each in tensors.items() if is_mtp_tensor(n)})
    model.mtp.to(dtype)
    return model
