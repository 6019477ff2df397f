"""The forward pass of heads of EAGLE-1 and EAGLE-2 in PyTorch operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.decoder_layer import DecoderLayer
from draftwise.models.heads.forward import HeadOutput
from draftwise.models.heads.spec import EagleSpec
from draftwise.models.norm import Norm
from draftwise.models.packing import PackedBatch


class EagleForward:
    """A head of EAGLE (Li et al. 2024, arXiv 2401.15077, section 3.1) on packed tokens.

    The feature f_i is the target's hidden state at position i after the final norm, which the
    target projects to its vocabulary. The head reads token x_{i+1} together with f_i and predicts
    f_{i+1}, whose projection is the distribution of x_{i+2}. Within a draft it reads its own
    prediction in place of f_i. EAGLE-2 (arXiv 2406.16858) has the same head.
    """

    def __init__(
        self,
        spec: EagleSpec,
        final_norm: Callable[[Tensor], Tensor],
        projection: Callable[[Tensor], Tensor],
    ) -> None:
        """Take over a head. Its linear layers lose their weights.

        Args:
            spec: the head.
            final_norm: the target's final norm.
            projection: the target's projection of features to logits, used unless the head has its
                own.
        """
        self._spec, self._final_norm = spec, final_norm
        dtype = spec.embedding.weight.dtype
        self._embedding_norm = Norm.of(spec.embedding_norm, dtype)
        self._fusion = join_linear([spec.fusion])
        self._layers = [DecoderLayer(spec, layer, dtype) for layer in spec.layers]
        self._norm = Norm.of(spec.norm, dtype)
        self._projection = projection if spec.head is None else join_linear([spec.head])

    @property
    def never_waits(self) -> bool:
        """Whether a pass can be recorded, as it never waits for the device."""
        return not self._spec.rotary.is_dynamic

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
            states: ``[tokens, hidden]`` output of the target's last layer at the position before
                each token; ``None`` within a draft.
            carried: ``[tokens, hidden]`` the head's own prediction there; ``None`` with ``states``.
            logit_rows: ``[rows]`` indices of the tokens whose results are returned; ``None`` for
                all tokens.
        """
        features = carried if states is None else self._final_norm(states)
        assert features is not None
        embedded = F.embedding(ids, self._spec.embedding.weight)
        if self._embedding_norm is not None:
            embedded = self._embedding_norm(embedded)
        hidden = self._fusion(torch.cat((embedded, features), dim=1))
        cos, sin = self._spec.rotary(packed.positions)
        angles = cos.to(hidden.dtype).unsqueeze(1), sin.to(hidden.dtype).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, angles, packed)
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        logits = self._projection(hidden if self._norm is None else self._norm(hidden))
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        return HeadOutput(logits, hidden)
