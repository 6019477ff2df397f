"""Tiny random EAGLE-3 heads, written in both layouts that heads are published in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYOUTS = ("safeailab", "speculators")


@dataclass(frozen=True)
class HeadRecipe:
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

    @property
    def sizes(self) -> dict[str, Any]:
        """The decoder layer's configuration."""
        return {
            "model_type": "qwen3" if self.qwen else "llama",
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
            **self.layer,
        }

    def changed(self, **changes: Any) -> HeadRecipe:
        """The recipe with other fields."""
        return replace(self, **changes)

    def target_ids(self) -> Tensor:
        """``[draft_vocab]`` the target's ids of the proposed tokens, spread over the vocabulary."""
        return torch.arange(self.draft_vocab) * self.vocab // self.draft_vocab

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names of ``speculators``."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes, hidden = self.sizes, self.hidden
        head, inner = sizes["head_dim"], sizes["intermediate_size"]
        queries, keys = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
        count = len(self.layers or (0, 0, 0))
        states = count * self.target_hidden

        def matrix(rows, columns, scale=1.0):
            return scale * torch.randn(rows, columns, generator=generator) / columns**0.5

        def norm(size):
            return 1 + 0.2 * torch.randn(size, generator=generator)

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
            width, layer = (1 if index else 2) * hidden, f"layers.{index}."
            made |= {
                layer + "self_attn.q_proj.weight": matrix(queries, width, 2.0),
                layer + "self_attn.k_proj.weight": matrix(keys, width, 2.0),
                layer + "self_attn.v_proj.weight": matrix(keys, width, 2.0),
                layer + "self_attn.o_proj.weight": matrix(hidden, queries),
                layer + "mlp.gate_proj.weight": matrix(inner, hidden),
                layer + "mlp.up_proj.weight": matrix(inner, hidden),
                layer + "mlp.down_proj.weight": matrix(hidden, inner),
                layer + "input_layernorm.weight": norm(hidden),
                layer + "post_attention_layernorm.weight": norm(hidden),
            }
            if self.qwen:
                made[layer + "self_attn.q_norm.weight"] = norm(head)
                made[layer + "self_attn.k_norm.weight"] = norm(head)
        made["layers.0.hidden_norm.weight"] = norm(hidden)
        if self.draft_vocab != self.vocab:
            ids = self.target_ids()
            made["d2t"] = ids - torch.arange(self.draft_vocab)
            made["t2d"] = torch.zeros(self.vocab, dtype=torch.bool)
            made["t2d"][ids] = True
        return made

    def config(self, layout: str) -> dict[str, Any]:
        """The contents of ``config.json``."""
        ids = {} if self.layers is None else {"eagle_aux_hidden_state_layer_ids": [*self.layers]}
        own = {"draft_vocab_size": self.draft_vocab, **self.settings}
        if self.hidden != self.target_hidden:
            own["target_hidden_size"] = self.target_hidden
        if layout == "safeailab":
            architectures = ["LlamaForCausalLMEagle3"]
            eagle = {"eagle_config": ids} if ids else {}
            return {"architectures": architectures, **self.sizes, **own, **eagle}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
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

    def save(
        self,
        folder: Path,
        layout: str = "speculators",
        pickled: bool = False,
        changes: Mapping[str, Any] | None = None,
        without: tuple[str, ...] = (),
        tensors: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Write the head.

        Args:
            folder: is created.
            layout: one of :data:`LAYOUTS`.
            pickled: whether the weights are a ``.bin`` file.
            changes: settings of ``config.json`` that differ.
            without: tensors that are left out, by the names of ``speculators``.
            tensors: tensors that differ, by the same names.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v for k, v in self.tensors().items() if k not in without} | (tensors or {})
        if layout == "safeailab":
            weights = {k.replace("layers.0.", "midlayer."): v for k, v in weights.items()}
        if pickled:
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
        config = self.config(layout) | (changes or {})
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
