"""Tiny random heads of EAGLE-1 and EAGLE-2, written in both layouts that they are published in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .tiny_drafts import RandomWeights, TinyHead

# Beginnings of the names in the authors' layout, and what ``speculators`` has instead.
_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer.", "norm.": "pre_lm_head_layernorm."}


@dataclass(frozen=True)
class EagleRecipe(TinyHead):
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
        return self.layer_sizes("qwen2" if self.biased_attention else "llama", self.num_layers)

    @property
    def default_layout(self) -> str:
        """That of the recipe."""
        return self.layout

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names of the authors; ``norm.weight`` is before the projection."""
        draw, sizes, hidden = RandomWeights(self.seed), self.sizes, self.hidden
        matrix, norm, head = draw.matrix, draw.norm, sizes["head_dim"]
        queries, keys = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
        made = {"fc.weight": matrix(hidden, 2 * hidden, 0.5)}
        if self.bias is not False:
            made["fc.bias"] = draw.vector(hidden, 0.3)
        if self.own_embedding:
            made["embed_tokens.weight"] = matrix(self.vocab, hidden, hidden**0.5)
        if self.own_projection:
            made["lm_head.weight"] = matrix(self.vocab, hidden, hidden**0.5)
        if self.layernorms:
            made |= {"embedding_layernorm.weight": norm(hidden), "norm.weight": norm(hidden)}
        for index in range(self.num_layers):
            layer = f"layers.{index}."
            made |= draw.layer(layer, sizes, leaving=0.5)
            if not index and not self.layernorms:
                del made[layer + "input_layernorm.weight"]
            if self.biased_attention:
                for part, size in (("q", queries), ("k", keys), ("v", keys)):
                    name = f"{layer}self_attn.{part}_proj.bias"
                    made[name] = draw.vector(size, 0.3)
        return made

    def config(self, layout: str | None = None) -> dict[str, Any]:
        """The contents of ``config.json``, in the layout of the recipe."""
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

    def name_in(self, layout: str, name: str) -> str:
        """The name of a tensor in the layout of the recipe."""
        return _renamed(name) if self.layout == "speculators" else name


def _renamed(name: str) -> str:
    for own, other in _NAMES.items():
        if name.startswith(own):
            return other + name.removeprefix(own)
    return name
