"""Training-time test of an MTP layer: its drafts over packed documents, step after step.

Step 0 pairs the target's state of position t with the token at t + 1 and predicts the token at
t + 2. Step k pairs the layer's own output of step k - 1 with the token at t + 1 + k. Its query
reads the keys of the true states up to t, and the keys of steps 1 … k of its own draft. A served
layer does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from draftwise.distillation.documents import Rows, shifted
from draftwise.distillation.unrolled import attend_chains

_ATTENTION = "draftwise_chains"


def follow_chains(layer: Any) -> None:
    """Let the attention of an MTP layer be computed by :func:`unroll_mtp`.

    Args:
        layer: a ``MtpLayer`` of transformers.
    """
    layer.config._attn_implementation = _ATTENTION


def unroll_mtp(
    layer: nn.Module, rotary: Any, rows: Rows, final: Tensor, embedding: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Compute a draft from every position, one step after the other.

    Args:
        layer: a layer after :func:`follow_chains`.
        rotary: the target's rotary embedding; ``None`` for a target without one.
        rows: packed documents, on the layer's device.
        final: ``[rows, length, hidden]`` the target's states as the layer reads them.
        embedding: ``[vocab, hidden]`` the target's input embedding.
        num_steps: steps of each draft.

    Yields:
        For each step k, ``[rows, length, hidden]`` what the target's projection reads. At position
        t it predicts the token at t + 2 + k.
    """
    chains, state = _Chains(rows), final
    for depth in range(num_steps):
        embedded = F.embedding(shifted(rows.tokens, depth + 1), embedding).float()
        positions = rows.positions + depth
        angles = None if rotary is None else rotary(embedded, position_ids=positions)
        with chains.followed():
            state = layer(
                embedded,
                state.float(),
                position_embeddings=angles,
                attention_mask=None,
                position_ids=positions,
                past_key_values=None,
            )
        yield state


class _Chains:
    """Keys and values of a layer: those of the true states, and those of each draft's own steps."""

    def __init__(self, rows: Rows) -> None:
        length = rows.tokens.shape[1]
        same = rows.documents[:, :, None] == rows.documents[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        mask = torch.zeros(same.shape, device=same.device)
        self._mask = mask.masked_fill_(~(same & causal), float("-inf")).unsqueeze(1)
        self._true: tuple[Tensor, Tensor] | None = None
        self._own_keys: list[Tensor] = []
        self._own_values: list[Tensor] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the context, the layer computes the next step."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attention of a step.

        Args:
            query: ``[rows, heads, length, key_size]``.
            key: ``[rows, kv_heads, length, key_size]``.
            value: ``[rows, kv_heads, length, value_size]``.
            scaling: factor of the scores.

        Returns:
            ``[rows, length, heads, value_size]``.
        """
        if self._true is None:
            self._true = key, value
        else:
            self._own_keys.append(key)
            self._own_values.append(value)
        out = attend_chains(
            query.transpose(1, 2),
            *self._true,
            self._own_keys,
            self._own_values,
            self._mask,
            scaling,
        )
        return out.view(*out.shape[:2], query.shape[1], -1)


_current: ContextVar[_Chains | None] = ContextVar("chains", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' modules within :meth:`_Chains.followed`."""
    chains = _current.get()
    assert chains is not None, "the layer is called outside of its drafts"
    return chains.attend(query, key, value, scaling), None


AttentionInterface.register(_ATTENTION, _attention)
