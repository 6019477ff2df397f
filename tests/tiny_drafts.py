"""What tiny random heads of all kinds share: sizes of layers, random weights, and their folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor


class RandomWeights:
    """Random weights, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        """``[rows, columns]`` that keeps the size of what it multiplies, times a scale."""
        return scale * torch.randn(rows, columns, generator=self.generator) / columns**0.5

    def vector(self, size: int, scale: float) -> Tensor:
        """``[size]`` around 0."""
        return scale * torch.randn(size, generator=self.generator)

    def norm(self, size: int) -> Tensor:
        """``[size]`` around 1."""
        return 1 + self.vector(size, 0.2)

    def layer(
        self,
        name: str,
        sizes: Mapping[str, Any],
        width: int | None = None,
        leaving: float = 1.0,
        norms_heads: bool = False,
    ) -> dict[str, Tensor]:
        """A decoder layer of Llama, or with norms of queries and keys of Qwen 3.

        Args:
            name: beginning of its names.
            sizes: its configuration.
            width: numbers that the attention reads; by default the residual stream.
            leaving: scale of what is added to the residual stream.
            norms_heads: whether queries and keys are normalised.
        """
        hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
        queries, keys = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
        width, matrix, norm = width or hidden, self.matrix, self.norm
        made = {
            "self_attn.q_proj": matrix(queries, width, 2.0),
            "self_attn.k_proj": matrix(keys, width, 2.0),
            "self_attn.v_proj": matrix(keys, width, 2.0),
            "self_attn.o_proj": matrix(hidden, queries, leaving),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner, leaving),
            "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
        }
        if norms_heads:
            made |= {"self_attn.q_norm": norm(head), "self_attn.k_norm": norm(head)}
        return {f"{name}{part}.weight": each for part, each in made.items()}


class TinyHead:
    """A recipe of a tiny head: a frozen dataclass that says what its folder contains."""

    vocab: int
    hidden: int
    default_layout = "speculators"

    def layer_sizes(self, model_type: str, num_layers: int) -> dict[str, Any]:
        """The configuration of its decoder layers, which fit the tiny Llama of ``tiny_models``."""
        return {
            "model_type": model_type,
            "hidden_size": self.hidden,
            "intermediate_size": 24,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 64,
            "vocab_size": self.vocab,
        }

    def changed(self, **changes: Any) -> Self:
        """The recipe with other fields."""
        return replace(self, **changes)

    @property
    def own_vocab(self) -> int:
        """Number of tokens that it proposes."""
        return self.vocab

    def target_ids(self) -> Tensor:
        """``[own_vocab]`` the target's ids of the proposed tokens, spread over the vocabulary."""
        return torch.arange(self.own_vocab) * self.vocab // self.own_vocab

    def vocabulary(self) -> dict[str, Tensor]:
        """The tensors that map its tokens to the target's; empty if they are the same."""
        if self.own_vocab == self.vocab:
            return {}
        ids, is_proposed = self.target_ids(), torch.zeros(self.vocab, dtype=torch.bool)
        is_proposed[ids] = True
        return {"d2t": ids - torch.arange(self.own_vocab), "t2d": is_proposed}

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names that they are changed and left out by."""
        raise NotImplementedError

    def config(self, layout: str) -> dict[str, Any]:
        """The contents of ``config.json`` in a layout."""
        raise NotImplementedError

    def name_in(self, layout: str, name: str) -> str:
        """The name of a tensor in a layout."""
        return name

    def save(
        self,
        folder: Path,
        layout: str | None = None,
        changes: Mapping[str, Any] | None = None,
        without: tuple[str, ...] = (),
        tensors: Mapping[str, Tensor] | None = None,
        pickled: bool = False,
    ) -> str:
        """Write the head.

        Args:
            folder: is created.
            layout: one of those of its kind; ``None`` for its default.
            changes: settings of ``config.json`` that differ.
            without: tensors that are left out.
            tensors: tensors that differ.
            pickled: whether the weights are a ``.bin`` file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        layout = layout or self.default_layout
        kept = {name: each for name, each in self.tensors().items() if name not in without}
        weights = {
            self.name_in(layout, name): each.contiguous()
            for name, each in (kept | dict(tensors or {})).items()
        }
        if pickled:
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            save_file(weights, folder / "model.safetensors")
        config = self.config(layout) | dict(changes or {})
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
