"""The forward pass of an EAGLE-3 head in PyTorch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.decoder_layer import DecoderLayer
from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.norm import Norm
from draftwise.models.packing import PackedBatch


class HeadOutput(NamedTuple):
    """What a pass of a head returns for the rows that were asked for.

    Attributes:
        logits: ``[rows, draft_vocab]`` over the tokens that the head proposes.
        carried: ``[rows, hidden]`` what the next token of a draft reads in place of a state.
    """

    logits: Tensor
    carried: Tensor


class HeadForward:
    """An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840, section 3.1) on packed tokens.

    The head reads token x_{i+1} together with g_i, the projection of the target's states at
    position i, and computes the distribution of x_{i+2}. Within a draft the target's states are not
    known yet, and g_i is the head's own output at the position before.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        """Take over a head. Its linear layers lose their weights."""
        assert spec.state_input is not None
        assert spec.head is not None
        self._spec, self._reads = spec, spec.state_input
        dtype = spec.embedding.weight.dtype
        self._layers = [DecoderLayer(spec, layer, dtype) for layer in spec.layers]
        self._projection = join_linear([self._reads.projection])
        self._joint_norm = Norm.of(self._reads.joint_norm, dtype)
        self._norms = [Norm(each, dtype) for each in self._reads.norms]
        self._state_norm = Norm(self._reads.state_norm, dtype)
        self._norm, self._head = Norm(spec.norm, dtype), join_linear([spec.head])

    @property
    def never_waits(self) -> bool:
        """Whether a pass can be recorded, as it never waits for the device."""
        return not any(table.is_dynamic for table in self._spec.rotary.values())

    def __call__(
        self,
        ids: Tensor,
        packed: PackedBatch,
        states: Tensor | None,
        carried: Tensor | None,
        logit_rows: Tensor | None,
    ) -> HeadOutput:
        """Compute a pass.

        Args:
            ids: ``[tokens]`` token ids of the target.
            packed: plan of this pass.
            states: ``[tokens, states * target_hidden]`` the target's states at the position before
                each token; ``None`` within a draft.
            carried: ``[tokens, hidden]`` the head's own output there; ``None`` with ``states``.
            logit_rows: ``[rows]`` indices of the tokens whose results are returned; ``None`` for
                all tokens.
        """
        projected = carried if states is None else self._project(states)
        assert projected is not None
        cos, sin = self._spec.rotary[self._spec.layers[0].rotary or ""](packed.positions)
        dtype = projected.dtype
        angles = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
        normed = self._state_norm(projected)
        hidden = normed if self._reads.norm_before_residual else projected
        embedded = F.embedding(ids, self._spec.embedding.weight)
        for index, layer in enumerate(self._layers):
            if index == 0:
                assert layer.attention_norm is not None
                both = torch.cat((layer.attention_norm(embedded), normed), dim=1)
                hidden = layer.after_norm(index, both, hidden, angles, packed)
            else:
                hidden = layer(index, hidden, angles, packed)
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        out = self._norm(hidden)
        logits = self._head(out)
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        return HeadOutput(logits, out if self._reads.norm_output else hidden)

    def _project(self, states: Tensor) -> Tensor:
        """``[tokens, hidden]`` g of equation 1: the target's states in the size of the head."""
        if self._joint_norm is not None:
            states = self._joint_norm(states)
        if self._norms:
            parts = states.chunk(len(self._norms), dim=1)
            normed = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
            states = torch.cat(normed, dim=1)
        return self._projection(states)
