"""Training-time test: the head's chains over packed documents, unrolled over several steps.

Step 0 pairs the target's state of position t with the token at t + 1 and predicts the token at
t + 2. Step k pairs the head's own output of step k - 1 with the token at t + 1 + k. Its query reads
the keys of the true states up to t, and the keys of steps 1 … k of its own chain. This is what a
served head reads while it drafts from position t, for many t at once (Li et al. 2025,
arXiv:2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows, shifted
from draftwise.distillation.head import Eagle3Head
from draftwise.distillation.trained_head import rotate


def unroll(
    head: Eagle3Head,
    rows: Rows,
    states: Tensor,
    embedding: Tensor,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """Compute the chains of some positions, one step after the other.

    All positions give keys and values. Everything else is computed for the chains alone, as the
    positions of prompts and of padding begin none.

    Args:
        head: the head.
        rows: packed documents, on the head's device.
        states: ``[rows, length, num_states * target_hidden]`` the target's states.
        embedding: ``[vocab, hidden]`` the input embedding.
        begins: ``[rows, length]`` whether a chain begins at the position; at least one does. Chains
            are in the order of this mask's true entries.
        num_steps: steps of each chain.

    Yields:
        For each step k, ``[num_chains, hidden]`` outputs before the final norm. In a chain from the
        true state of position t, they predict the token at t + 2 + k.
    """
    config = head.config
    attention = head.layer.self_attn
    chains = _Chains.of(begins)
    mask = chains.visible(rows)
    tokens, positions = rows.tokens, rows.positions.flatten()

    def rotated(projected: Tensor, at: Tensor) -> Tensor:
        return rotate(projected.view(len(at), -1, config.head_size), *head.rotation(at))

    def by_row(projected: Tensor) -> Tensor:
        """``[rows * length, …]`` keys or values -> ``[rows, kv_heads, length, head_size]``."""
        return projected.view(*tokens.shape, -1, config.head_size).transpose(1, 2)

    g = head.project(states).flatten(0, 1)
    wide, residual = head.enter(embedding[shifted(tokens, 1).flatten()], g)
    true_keys = by_row(rotated(attention.k_proj(wide), positions))
    true_values = by_row(attention.v_proj(wide))
    wide = wide.index_select(0, chains.starts)
    residual = residual.index_select(0, chains.starts)
    positions = positions[chains.starts]
    # Keys and values of the chains' own steps: [rows, kv_heads, width, head_size].
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for depth in range(num_steps):
        if depth > 0:
            following = shifted(tokens, depth + 1).flatten()[chains.starts]
            wide, residual = head.enter(embedding[following], g)
            keys = rotated(attention.k_proj(wide), positions + depth)
            values = attention.v_proj(wide).view(len(positions), -1, config.head_size)
            own_keys.append(chains.spread(keys).transpose(1, 2))
            own_values.append(chains.spread(values).transpose(1, 2))
        queries = chains.spread(rotated(attention.q_proj(wide), positions + depth))
        attended = attend_chains(queries, true_keys, true_values, own_keys, own_values, mask)
        out = head.leave(chains.gather(attended), residual)
        yield out
        g = head.chained(out)


@dataclass(frozen=True)
class _Chains:
    """Where chains begin, and their places in a grid that has a column per chain of a row.

    Attributes:
        starts: ``[num_chains]`` index of the first position in the flattened rows.
        places: ``[num_chains]`` index in the flattened grid.
        num_rows: number of rows.
        width: columns of the grid, which are the most chains of a row.
    """

    starts: Tensor
    places: Tensor
    num_rows: int
    width: int

    @classmethod
    def of(cls, begins: Tensor) -> _Chains:
        """``[rows, length]`` whether a chain begins at the position."""
        columns = begins.cumsum(dim=1) - 1
        width = int(columns.max()) + 1
        rows = torch.arange(len(begins), device=begins.device).unsqueeze(1)
        return cls(
            begins.flatten().nonzero().squeeze(1),
            (rows * width + columns)[begins],
            len(begins),
            width,
        )

    def spread(self, x: Tensor) -> Tensor:
        """``[num_chains, …]`` -> ``[rows, width, …]``, 0 where there is no chain."""
        grid = x.new_zeros(self.num_rows * self.width, *x.shape[1:])
        return grid.index_copy(0, self.places, x).view(self.num_rows, self.width, *x.shape[1:])

    def gather(self, grid: Tensor) -> Tensor:
        """``[rows, width, …]`` -> ``[num_chains, …]``."""
        return grid.flatten(0, 1).index_select(0, self.places)

    def visible(self, rows: Rows) -> Tensor:
        """``[rows, 1, width, length]`` additive mask of causal attention within a document."""
        num_rows, length = rows.documents.shape
        columns = self.spread(self.starts % length)
        same = rows.documents.gather(1, columns)[:, :, None] == rows.documents[:, None, :]
        causal = torch.arange(length, device=columns.device) <= columns[:, :, None]
        mask = torch.zeros(num_rows, self.width, length, device=columns.device)
        # A place without a chain sees the first position, as a softmax needs something.
        return mask.masked_fill_(~(same & causal), float("-inf")).unsqueeze(1)


def attend_chains(
    queries: Tensor,
    true_keys: Tensor,
    true_values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    mask: Tensor,
    scaling: float | None = None,
) -> Tensor:
    """Attention to the true states up to each position, and to the chain's own steps.

    Args:
        queries: ``[rows, width, heads, head_size]``.
        true_keys: ``[rows, kv_heads, length, head_size]``.
        true_values: ``[rows, kv_heads, length, value_size]``.
        own_keys: ``[rows, kv_heads, width, head_size]`` keys of each own step; a query reads those
            of its own chain only.
        own_values: their values.
        mask: ``[rows, 1, width, length]``.
        scaling: factor of the scores; ``None`` for 1 / √head_size.

    Returns:
        ``[rows, width, heads * value_size]``.
    """
    num_rows, width, _, head_size = queries.shape
    num_kv_heads, length = true_keys.shape[1:3]
    # Heads that share keys are folded into the query length.
    folded = queries.view(num_rows, width, num_kv_heads, -1, head_size)
    folded = folded.permute(0, 2, 3, 1, 4) * (head_size**-0.5 if scaling is None else scaling)
    flat = folded.reshape(num_rows, num_kv_heads, -1, head_size)
    scores = (flat @ true_keys.transpose(-1, -2)).view(*folded.shape[:4], length)
    scores = scores.float() + mask.unsqueeze(1)
    if own_keys:
        own = [(folded * keys.unsqueeze(2)).sum(dim=-1, keepdim=True) for keys in own_keys]
        scores = torch.cat([scores, *(each.float() for each in own)], dim=-1)
    weights = scores.softmax(dim=-1).to(true_values.dtype)
    true = weights[..., :length].reshape(*flat.shape[:3], length) @ true_values
    attended: Tensor = true.view(*folded.shape[:4], -1)
    for index, values in enumerate(own_values):
        attended = attended + weights[..., length + index, None] * values.unsqueeze(2)
    attended = attended.permute(0, 3, 1, 2, 4)
    return attended.reshape(num_rows, width, -1)
