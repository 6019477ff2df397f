"""Tiny random heads of EAGLE-1 and EAGLE-2, written in both layouts that they are published in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Beginnings of the names in the authors' layout, and what ``speculators`` has instead.
_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer.", "norm.": "pre_lm_head_layernorm."}


@dataclass(frozen=True)
class EagleRecipe:
    """What a tiny head is made of. The default fits the tiny Llama of ``tiny_models``.

    Attributes:
        layout: ``"safeailab"`` or ``"speculators"``.
        vocab: tokens of the target.
        hidden: size of the residual streams.
        bias: whether ``fc`` has a bias; ``None`` for one that the configuration does not mention.
        layernorms: the setting of ``speculators``.
        num_layers: decoder layers.
        own_embedding, own_projection: whether the head has these itself.
        biased_attention: whether queries, keys and values have biases, as in Qwen 2.
        settings: other settings of ``config.json``.
        seed: of the weights.
    """

    layout: str = "safeailab"
    vocab: int = 8
    hidden: int = 16
    bias: bool | None = False
    layernorms: bool = False
    num_layers: int = 1
    own_embedding: bool = False
    own_projection: bool = False
    biased_attention: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    # Of the tests' equations: there are no norms of queries and keys.
    qwen: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """The decoder layer's configuration."""
        return {
            "model_type": "qwen2" if self.biased_attention else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 24,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 64,
            "vocab_size": self.vocab,
        }

    def changed(self, **changes: Any) -> EagleRecipe:
        """The recipe with other fields."""
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names of the authors; ``norm.weight`` is before the projection."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes, hidden = self.sizes, self.hidden
        head, inner = sizes["head_dim"], sizes["intermediate_size"]
        queries, keys = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]

        def matrix(rows, columns, scale=1.0):
            return scale * torch.randn(rows, columns, generator=generator) / columns**0.5

        def norm(size):
            return 1 + 0.2 * torch.randn(size, generator=generator)

        made = {"fc.weight": matrix(hidden, 2 * hidden, 0.5)}
        if self.bias is not False:
            made["fc.bias"] = 0.3 * torch.randn(hidden, generator=generator)
        if self.own_embedding:
            made["embed_tokens.weight"] = matrix(self.vocab, hidden, hidden**0.5)
        if self.own_projection:
            made["lm_head.weight"] = matrix(self.vocab, hidden, hidden**0.5)
        if self.layernorms:
            made |= {"embedding_layernorm.weight": norm(hidden), "norm.weight": norm(hidden)}
        for index in range(self.num_layers):
            layer = f"layers.{index}."
            made |= {
                layer + "self_attn.q_proj.weight": matrix(queries, hidden, 2.0),
                layer + "self_attn.k_proj.weight": matrix(keys, hidden, 2.0),
                layer + "self_attn.v_proj.weight": matrix(keys, hidden, 2.0),
                layer + "self_attn.o_proj.weight": matrix(hidden, queries, 0.5),
                layer + "mlp.gate_proj.weight": matrix(inner, hidden),
                layer + "mlp.up_proj.weight": matrix(inner, hidden),
                layer + "mlp.down_proj.weight": matrix(hidden, inner, 0.5),
                layer + "post_attention_layernorm.weight": norm(hidden),
            }
            if index or self.layernorms:
                made[layer + "input_layernorm.weight"] = norm(hidden)
            if self.biased_attention:
                for part, size in (("q", queries), ("k", keys), ("v", keys)):
                    name = f"{layer}self_attn.{part}_proj.bias"
                    made[name] = 0.3 * torch.randn(size, generator=generator)
        return made

    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        if self.layout == "safeailab":
            bias = {} if self.bias is None else {"bias": self.bias}
            return {"architectures": ["LlamaForCausalLM"], **self.sizes, **bias, **self.settings}
        return {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "speculators_model_type": "eagle",
            "speculators_config": {
                "algorithm": "eagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
            },
            "transformer_layer_architecture": "LlamaDecoderLayer",
            # It may be the target's configuration. The head has one layer in any case.
            "transformer_layer_config": {**self.sizes, "num_hidden_layers": 32},
            "layernorms": self.layernorms,
            "fusion_bias": bool(self.bias),
            **self.settings,
        }

    def save(
        self,
        folder: Path,
        layout: str | None = None,
        pickled: bool = False,
        changes: Mapping[str, Any] | None = None,
        without: tuple[str, ...] = (),
        tensors: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Write the head.

        Args:
            folder: is created.
            layout: is that of the recipe.
            pickled: whether the weights are a ``.bin`` file.
            changes: settings of ``config.json`` that differ.
            without: tensors that are left out, by the names of the authors.
            tensors: tensors that differ, by the same names.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v for k, v in self.tensors().items() if k not in without} | (tensors or {})
        if self.layout == "speculators":
            weights = {_renamed(name): each for name, each in weights.items()}
        if pickled:
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config() | dict(changes or {})))
        return str(folder)


def _renamed(name: str) -> str:
    for own, other in _NAMES.items():
        if name.startswith(own):
            return other + name.removeprefix(own)
    return name
