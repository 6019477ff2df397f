"""The forward pass of a layer that a target was trained with to predict a second token (MTP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftwise.models.attention_interface import following
from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.heads.forward import HeadOutput
from draftwise.models.packed_model import LazyEmbedding, embedded
from draftwise.models.packing import PackedBatch


@dataclass(frozen=True)
class MtpSpec:
    """A layer that predicts the token after the next one, with what it shares with its target.

    Attributes:
        layer: a ``MtpLayer`` of transformers: norms of embedding and state, their projection, a
            decoder layer of the target's kind, and a norm.
        rotary: the target's rotary embedding; ``None`` for a target without one.
        embedding: ``[tokens, hidden]`` the target's token embedding, or the rows that it is
            expanded from.
        final_norm: what the target's state passes before the layer reads it; ``None`` for families
            whose layer reads the output of the last layer as it is.
        projection: the target's projection to the vocabulary.
        hidden_size: size of the target's residual stream.
        decoder: the layer for the native kernels; ``None`` where they do not compute it.
        why_no_decoder: why they do not, as a clause.
    """

    layer: Any
    rotary: Any
    embedding: Tensor | LazyEmbedding
    final_norm: Callable[[Tensor], Tensor] | None
    projection: Callable[[Tensor], Tensor]
    hidden_size: int
    decoder: DecoderSpec | None = None
    why_no_decoder: str | None = None


class MtpForward:
    """One MTP layer (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2) on packed tokens.

    It reads token x_{i+1} together with the target's state at position i and predicts x_{i+2}.
    Within a draft it reads its own output at the position before in place of the state.
    """

    never_waits = False

    def __init__(self, spec: MtpSpec) -> None:
        self._spec = spec

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
            carried: ``[tokens, hidden]`` the layer's own output there; ``None`` with ``states``.
            logit_rows: ``[rows]`` indices of the tokens whose results are returned; ``None`` for
                all tokens.
        """
        spec, features = self._spec, carried
        if states is not None:
            features = states if spec.final_norm is None else spec.final_norm(states)
        assert features is not None
        inputs = embedded(ids, spec.embedding).unsqueeze(0)
        positions = packed.positions.unsqueeze(0)
        angles = None if spec.rotary is None else spec.rotary(inputs, position_ids=positions)
        with following(packed):
            hidden: Tensor = spec.layer(
                inputs,
                features.unsqueeze(0).to(inputs.dtype),
                position_embeddings=angles,
                attention_mask=None,
                position_ids=positions,
                past_key_values=None,
            )[0]
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        return HeadOutput(spec.projection(hidden), hidden)
