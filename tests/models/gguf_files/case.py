"""The cases: what each file changes in the base file of its architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Tokens from here on are a case's special tokens; those before are ordinary ones.
FIRST_SPECIAL = 300


@dataclass(frozen=True)
class Case:
    """One file.

    Attributes:
        architecture: Its ``general.architecture``.
        keys: Changed metadata. Names that do not begin with ``general.`` or ``tokenizer.`` get the
            architecture as their prefix. ``None`` leaves a key out; a token id may be given as
            the token's text.
        tensors: Changed tensors, in every layer where the name has ``*``: a tuple is a shape for
            random numbers, a list the numbers themselves, ``None`` leaves the tensor out.
        context: Context length that llama.cpp is given.
        special: Texts of the special tokens.
        special_type: Their type in the file; 3 is control.
    """

    architecture: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    context: int = 1024
    special: tuple[str, ...] = ("<|bos|>", "<|eos|>")
    special_type: int = 3


def _llama3_factors(num_pairs: int) -> list[float]:
    """Llama 3.1's division of frequencies: factor 8, low 1, high 4, 256 original positions."""
    divisors = []
    for pair in range(num_pairs):
        turns = 256 / (2 * math.pi * 10000.0 ** (pair / num_pairs))
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        divisors.append(round(1 / ((1 - smooth) / 8 + smooth), 5))
    return divisors


def factors(num_pairs: int) -> dict[str, list[float]]:
    """Long and short factors of longrope."""
    return {
        "rope_factors_long.weight": [1 + pair / 4 for pair in range(num_pairs)],
        "rope_factors_short.weight": [1 + pair / 32 for pair in range(num_pairs)],
    }


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 256,
}
LONGROPE = {"rope.scaling.type": "longrope"}
BETAS = {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
LLAMA3 = {"rope_freqs.weight": _llama3_factors(16)}
TIED = {"output.weight": None}
WINDOW = {"attention.sliding_window": 64}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
QKV_BIAS = {"blk.*.attn_q.bias": (128,), "blk.*.attn_k.bias": (64,), "blk.*.attn_v.bias": (64,)}


def original(length: int | None) -> dict[str, int | None]:
    """Changes the context length from before an extension."""
    return {"rope.scaling.original_context_length": length}


def case(architecture: str, *keys: Mapping[str, Any], **rest: Any) -> Case:
    """A case of several changes of metadata, the later ones on top."""
    changed = {name: value for each in keys for name, value in each.items()}
    return Case(architecture, changed, **rest)


def mtp(architecture: str, num_blocks: int) -> Case:
    """A model whose last block is an MTP layer."""
    parts = {"eh_proj": (128, 256), "enorm": (128,), "hnorm": (128,), "shared_head_norm": (128,)}
    last = f"blk.{num_blocks - 1}.nextn"
    tensors = {f"{last}.{part}.weight": shape for part, shape in parts.items()}
    keys = {"block_count": num_blocks, "nextn_predict_layers": 1}
    return case(architecture, keys, tensors=tensors)
