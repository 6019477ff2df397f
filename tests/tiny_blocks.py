"""Tiny random heads that draft blocks, written in the three layouts that they are published in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYOUTS = ("z-lab", "deepspec", "speculators")


@dataclass(frozen=True)
class BlockRecipe:
    """What a tiny head is made of. The default fits the tiny Llama of ``tiny_models``.

    Attributes:
        layers: layers of the target whose output is read; -1 for the embedding.
        vocab, draft_vocab: tokens of the target, and those that the head proposes.
        block_size: rows of a block.
        discards_anchor: whether the first row predicts nothing.
        markov: kind of the Markov head; ``None`` for none.
        confidence: whether there is a confidence head.
        second: whether it is one of DFlash-2, with convolutions and a selector.
        windows: window of each layer; ``None`` for all tokens.
        causal: whether layers with a window are causal in the block.
        hidden: size of the residual streams.
        own_embedding, own_projection: whether the head has these itself.
        seed: of the weights.
        sharpness: standard deviation of the weights of the vocabulary projection.
        settings: other settings of the configuration.
    """

    layers: tuple[int, ...] = (-1, 0)
    vocab: int = 8
    draft_vocab: int | None = None
    block_size: int = 5
    discards_anchor: bool = True
    markov: str | None = None
    confidence: bool = False
    second: bool = False
    windows: tuple[int | None, ...] = (None, None)
    causal: bool = True
    hidden: int = 16
    own_embedding: bool = False
    own_projection: bool = False
    seed: int = 0
    sharpness: float = 0.6
    settings: Mapping[str, Any] = field(default_factory=dict)

    rank = 6
    taps, group_size, num_candidates = 3, 4, 5
    mask = 3

    @property
    def sizes(self) -> dict[str, Any]:
        """The configuration of the layers."""
        types = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
        window = next((w for w in self.windows if w is not None), None)
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": 24,
            "num_hidden_layers": len(self.windows),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 64,
            "vocab_size": self.vocab,
            "layer_types": types,
            "sliding_window": window,
        }

    @property
    def own_vocab(self) -> int:
        """Number of tokens that it proposes."""
        return self.draft_vocab or self.vocab

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a block predicts."""
        return self.block_size - self.discards_anchor

    def changed(self, **changes: Any) -> BlockRecipe:
        """The recipe with other fields."""
        return replace(self, **changes)

    def target_ids(self) -> Tensor:
        """``[own_vocab]`` the target's ids of the proposed tokens, spread over the vocabulary."""
        return torch.arange(self.own_vocab) * self.vocab // self.own_vocab

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names that all layouts share."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden, inner, head = self.hidden, 24, 6

        def matrix(rows, columns, scale=1.0):
            return scale * torch.randn(rows, columns, generator=generator) / columns**0.5

        def norm(size):
            return 1 + 0.2 * torch.randn(size, generator=generator)

        made = {
            "fc.weight": matrix(hidden, len(self.layers) * hidden),
            "hidden_norm.weight": norm(hidden),
            "norm.weight": norm(hidden),
        }
        for index in range(len(self.windows)):
            layer = f"layers.{index}."
            made |= {
                layer + "self_attn.q_proj.weight": matrix(4 * head, hidden, 2.0),
                layer + "self_attn.k_proj.weight": matrix(2 * head, hidden, 2.0),
                layer + "self_attn.v_proj.weight": matrix(2 * head, hidden, 2.0),
                layer + "self_attn.o_proj.weight": matrix(hidden, 4 * head),
                layer + "self_attn.q_norm.weight": norm(head),
                layer + "self_attn.k_norm.weight": norm(head),
                layer + "mlp.gate_proj.weight": matrix(inner, hidden),
                layer + "mlp.up_proj.weight": matrix(inner, hidden),
                layer + "mlp.down_proj.weight": matrix(hidden, inner),
                layer + "input_layernorm.weight": norm(hidden),
                layer + "post_attention_layernorm.weight": norm(hidden),
            }
        if self.own_embedding:
            made["embed_tokens.weight"] = matrix(self.vocab, hidden, hidden**0.5)
        if self.own_projection or self.draft_vocab:
            made["lm_head.weight"] = matrix(self.own_vocab, hidden, self.sharpness * hidden**0.5)
        if self.markov:
            rank = self.rank
            made["markov_head.markov_w1.weight"] = matrix(self.vocab, rank, rank**0.5)
            made["markov_head.markov_w2.weight"] = matrix(self.own_vocab, rank, 1.5)
            if self.markov == "gated":
                made["markov_head.gate_proj.weight"] = matrix(rank, hidden + rank, 2.0)
                made["markov_head.gate_proj.bias"] = norm(rank)
            elif self.markov == "rnn":
                made["markov_head.joint_proj.weight"] = matrix(3 * rank, 2 * rank + hidden, 2.0)
                made["markov_head.joint_proj.bias"] = norm(3 * rank)
        if self.second:
            groups = hidden // self.group_size
            for index in range(len(self.windows)):
                for part in ("attention_conv", "mlp_conv"):
                    name = f"layers.{index}.{part}."
                    base = 0.5 * torch.randn(2, self.taps, hidden, generator=generator)
                    base[:, 0] += 1.0
                    made[name + "base_kernel"] = base
                    rows = 2 * self.taps * groups
                    made[name + "kernel_projection.weight"] = matrix(rows, hidden, 0.5)
            name, rank = "candidate_selector.", self.rank
            made[name + "predecessor_codebook"] = matrix(self.vocab, rank, rank**0.5)
            made[name + "successor_codebook"] = matrix(self.vocab, rank, rank**0.5)
            made[name + "hidden_projection.weight"] = matrix(rank, hidden)
        if self.confidence:
            read = hidden + (self.rank if self.markov else 0)
            made["confidence_head.proj.weight"] = matrix(1, read)
            made["confidence_head.proj.bias"] = norm(1)
        if self.draft_vocab:
            ids = self.target_ids()
            made["d2t"] = ids - torch.arange(self.own_vocab)
            made["t2d"] = torch.zeros(self.vocab, dtype=torch.bool)
            made["t2d"][ids] = True
        return made

    def config(self, layout: str) -> dict[str, Any]:
        """The contents of ``config.json``."""
        markov = {
            "markov_rank": self.rank if self.markov else 0,
            "markov_head_type": self.markov or "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence and bool(self.markov),
        }
        block = {"block_size": self.block_size, "mask_token_id": self.mask}
        if self.second:
            block |= {
                "conv_kernel_size": self.taps,
                "conv_group_size": self.group_size,
                "selector_rank": self.rank,
                "selector_top_k": self.num_candidates,
            }
        if layout == "z-lab":
            nested = {"target_layer_ids": [*self.layers], **block}
            return {
                "architectures": ["DFlash2DraftModel" if self.second else "DFlashDraftModel"],
                **self.sizes,
                **({"is_causal": self.causal} if None not in self.windows else {}),
                **(markov if self.markov else {}),
                "dflash_config": nested,
                **self.settings,
            }
        if layout == "deepspec":
            return {
                "architectures": ["Qwen3DSparkModel"],
                **self.sizes,
                **markov,
                **block,
                "target_layer_ids": [*self.layers],
                "num_anchors": 512,
                **self.settings,
            }
        kind = "dspark" if self.markov else "dflash2" if self.second else "dflash"
        return {
            "architectures": ["DSparkSpeculator" if self.markov else "DFlashSpeculator"],
            "speculators_model_type": kind,
            "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": None}},
            "transformer_layer_config": self.sizes,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in self.layers],
            "draft_vocab_size": self.own_vocab,
            "sliding_window_non_causal": not self.causal,
            "sample_from_anchor": not self.discards_anchor,
            **block,
            **(markov if self.markov else {}),
            **self.settings,
        }

    def save(
        self,
        folder: Path,
        layout: str = "z-lab",
        changes: Mapping[str, Any] | None = None,
        without: tuple[str, ...] = (),
        tensors: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Write the head.

        Args:
            folder: is created.
            layout: one of :data:`LAYOUTS`.
            changes: settings of ``config.json`` that differ.
            without: tensors that are left out.
            tensors: tensors that differ.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v for k, v in self.tensors().items() if k not in without} | (tensors or {})
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
        config = self.config(layout) | dict(changes or {})
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
