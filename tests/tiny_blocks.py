"""Tiny random heads that draft blocks, written in the three layouts that they are published in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .tiny_drafts import RandomWeights, TinyHead

LAYOUTS = ("z-lab", "deepspec", "speculators")


@dataclass(frozen=True)
class BlockRecipe(TinyHead):
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
    default_layout = "z-lab"

    @property
    def sizes(self) -> dict[str, Any]:
        """The configuration of the layers."""
        types = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
        window = next((w for w in self.windows if w is not None), None)
        return {
            **self.layer_sizes("qwen3", len(self.windows)),
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

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names that all layouts share."""
        draw, hidden = RandomWeights(self.seed), self.hidden
        matrix, norm = draw.matrix, draw.norm
        made = {
            "fc.weight": matrix(hidden, len(self.layers) * hidden),
            "hidden_norm.weight": norm(hidden),
            "norm.weight": norm(hidden),
        }
        for index in range(len(self.windows)):
            made |= draw.layer(f"layers.{index}.", self.sizes, norms_heads=True)
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
                    base = 0.5 * torch.randn(2, self.taps, hidden, generator=draw.generator)
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
        return made | self.vocabulary()

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
