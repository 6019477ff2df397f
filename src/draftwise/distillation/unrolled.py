"""Training-time test: the head's chains over packed documents, unrolled over several steps.

Step 0 pairs the target's state of position t with the token at t + 1 and predicts the token at
t + 2. Step k pairs the head's own output of step k - 1 with the token at t + 1 + k. Its query reads
the keys of the true states up to t, and the keys of steps 1 … k of its own chain. This is what a
served head reads while it drafts from position t, for all t at once (Li et al. 2025,
arXiv:2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows
from draftwise.distillation.head import Eagle3Head, rotate


@dataclass(frozen=True)
class ChainStep:
    """The head's outputs in one step of all chains.

    Attributes:
        depth: number of the step, k.
        out: ``[rows, length, hidden]`` output before the final norm, by the position t of the last
            true state. It predicts the token at t + 2 + k.
    """

    depth: int
    out: Tensor


def shifted(x: Tensor, by: int, fill: float = 0) -> Tensor:
    """Move columns to the left: ``out[:, t] = x[:, t + by]``, and ``fill`` beyond the end.

    ``[rows, length, …]`` -> the same shape.
    """
    rest = x.new_full((len(x), min(by, x.shape[1]), *x.shape[2:]), fill)
    return torch.cat([x[:, by:], rest], dim=1)


def visible(rows: Rows) -> Tensor:
    """``[rows, 1, length, length]`` additive mask of causal attention within each document."""
    length = rows.tokens.shape[1]
    same = rows.documents[:, :, None] == rows.documents[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
    mask = torch.zeros(same.shape, device=same.device)
    return mask.masked_fill_(~(same & causal), float("-inf")).unsqueeze(1)


def unroll(
    head: Eagle3Head, rows: Rows, states: Tensor, embedding: Tensor, num_steps: int
) -> Iterator[ChainStep]:
    """Compute the chains of all positions, one step after the other.

    Args:
        head: the head.
        rows: packed documents, on the head's device.
        states: ``[rows, length, num_states * target_hidden]`` the target's states.
        embedding: ``[vocab, hidden]`` the input embedding.
        num_steps: steps of each chain.
    """
    config = head.config
    attention = head.layer.self_attn
    num_groups = config.num_heads // config.num_kv_heads
    num_rows, length = rows.tokens.shape
    mask = visible(rows)
    g = head.project(states)
    true_keys = true_values = None
    # Keys and values of the chains' own steps: [rows, kv_heads, length, head_size].
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for depth in range(num_steps):
        embedded = embedding[shifted(rows.tokens, depth + 1)]
        wide, residual = head.enter(embedded, g)
        cos, sin = head.rotation(rows.positions + depth)
        shape = (num_rows, length, -1, config.head_size)
        queries = rotate(attention.q_proj(wide).view(shape), cos, sin)
        keys = rotate(attention.k_proj(wide).view(shape), cos, sin).transpose(1, 2)
        values = attention.v_proj(wide).view(shape).transpose(1, 2)
        if true_keys is None or true_values is None:
            true_keys, true_values = keys, values
        else:
            own_keys.append(keys)
            own_values.append(values)
        attended = _attend(queries, true_keys, true_values, own_keys, own_values, mask, num_groups)
        out = head.leave(attended, residual)
        yield ChainStep(depth, out)
        g = head.chained(out)


def _attend(
    queries: Tensor,
    true_keys: Tensor,
    true_values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    mask: Tensor,
    num_groups: int,
) -> Tensor:
    """Attention to the true states up to each position, and to the chain's own steps.

    Args:
        queries: ``[rows, length, heads, head_size]``.
        true_keys: ``[rows, kv_heads, length, head_size]``.
        true_values: the same shape.
        own_keys: keys of each own step; the query at t reads entry t only.
        own_values: their values.
        mask: ``[rows, 1, length, length]``.
        num_groups: query heads per key head.

    Returns:
        ``[rows, length, heads * head_size]``.
    """
    num_rows, length, num_heads, head_size = queries.shape
    # Heads that share keys are folded into the query length.
    folded = queries.view(num_rows, length, num_heads // num_groups, num_groups, head_size)
    folded = folded.permute(0, 2, 3, 1, 4) * head_size**-0.5
    flat = folded.reshape(num_rows, num_heads // num_groups, num_groups * length, head_size)
    scores = (flat @ true_keys.transpose(-1, -2)).view(*folded.shape[:4], length)
    scores = scores.float() + mask.unsqueeze(1)
    if own_keys:
        own = [(folded * keys.unsqueeze(2)).sum(dim=-1, keepdim=True) for keys in own_keys]
        scores = torch.cat([scores, *(each.float() for each in own)], dim=-1)
    weights = scores.softmax(dim=-1).to(true_values.dtype)
    true = weights[..., :length].reshape(*flat.shape[:3], length) @ true_values
    attended: Tensor = true.view(folded.shape)
    for index, values in enumerate(own_values):
        attended = attended + weights[..., length + index, None] * values.unsqueeze(2)
    attended = attended.permute(0, 3, 1, 2, 4)
    return attended.reshape(num_rows, length, num_heads * head_size)
