"""Tiny random EAGLE-3 heads, written in both layouts that heads are published in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .tiny_drafts import RandomWeights, TinyHead

LAYOUTS = ("safeailab", "speculators")


@dataclass(frozen=True)
class HeadRecipe(TinyHead):
    """What a tiny head is made of. The default fits the tiny Llama of ``tiny_models``.

    Attributes:
        layers: ids of the target's states, as the input of a layer; ``None`` to leave them out.
        vocab, draft_vocab: tokens of the target, and those that the head proposes.
        hidden, target_hidden: sizes of the residual streams.
        settings: ``norm_before_residual`` and others of the configuration.
        qwen: whether queries and keys are normalised, as in a layer of Qwen 3.
        num_layers: decoder layers.
        own_embedding: whether the head has an embedding of its own.
        seed: of the weights.
        sharpness: standard deviation of the weights of the vocabulary projection.
        layer: settings of the decoder layer beside the sizes.
        mask_token: whether it is a head of P-EAGLE, with this mask token.
    """

    layers: tuple[int, ...] | None = (0, 1, 2)
    vocab: int = 8
    draft_vocab: int = 8
    hidden: int = 16
    target_hidden: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)
    qwen: bool = False
    num_layers: int = 1
    own_embedding: bool = False
    seed: int = 0
    sharpness: float = 0.5
    layer: Mapping[str, Any] = field(default_factory=dict)
    mask_token: int | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """The decoder layer's configuration."""
        kind = "qwen3" if self.qwen else "llama"
        return {**self.layer_sizes(kind, self.num_layers), **self.layer}

    @property
    def own_vocab(self) -> int:
        """Number of tokens that it proposes."""
        return self.draft_vocab

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names of ``speculators``."""
        draw, hidden = RandomWeights(self.seed), self.hidden
        matrix, norm = draw.matrix, draw.norm
        count = len(self.layers or (0, 0, 0))
        states = count * self.target_hidden
        made = {
            "fc.weight": matrix(hidden, states),
            "norm.weight": norm(hidden),
            "lm_head.weight": matrix(self.draft_vocab, hidden, self.sharpness * hidden**0.5),
        }
        if self.settings.get("norm_before_fc"):
            made["input_norm.weight"] = norm(states)
        if self.settings.get("fc_norm"):
            made |= {f"fc_norm.{index}.weight": norm(self.target_hidden) for index in range(count)}
        if self.own_embedding:
            made["embed_tokens.weight"] = matrix(self.vocab, hidden, hidden**0.5)
        for index in range(self.num_layers):
            width = (1 if index else 2) * hidden
            made |= draw.layer(f"layers.{index}.", self.sizes, width, norms_heads=self.qwen)
        made["layers.0.hidden_norm.weight"] = norm(hidden)
        if self.mask_token is not None:
            made["mask_hidden"] = draw.vector(states, 1.0).view(1, 1, states)
        return made | self.vocabulary()

    def name_in(self, layout: str, name: str) -> str:
        """The name of a tensor in a layout."""
        return name.replace("layers.0.", "midlayer.") if layout == "safeailab" else name

    def config(self, layout: str) -> dict[str, Any]:
        """The contents of ``config.json``."""
        ids = {} if self.layers is None else {"eagle_aux_hidden_state_layer_ids": [*self.layers]}
        own = {"draft_vocab_size": self.draft_vocab, **self.settings}
        if self.hidden != self.target_hidden:
            own["target_hidden_size"] = self.target_hidden
        if self.mask_token is not None:
            own["mask_token_id"] = self.mask_token
        if layout == "safeailab":
            architectures = ["LlamaForCausalLMEagle3"]
            eagle = {"eagle_config": ids} if ids else {}
            return {"architectures": architectures, **self.sizes, **own, **eagle}
        parallel = self.mask_token is not None
        return {
            "architectures": ["PEagleDraftModel" if parallel else "Eagle3Speculator"],
            "speculators_model_type": "peagle" if parallel else "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
            },
            "transformer_layer_config": self.sizes,
            **own,
            **ids,
        }
