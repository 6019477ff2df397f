"""A head of P-EAGLE, which predicts several tokens in one pass, ready to run."""

from __future__ import annotations

from torch import Tensor

from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.heads.model import HeadModel
from draftwise.models.layer_shape import LayerShape
from draftwise.models.packed_model import PackedModel


class ParallelHeadModel(HeadModel):
    """A head of EAGLE-3 that predicts tokens ahead (P-EAGLE, arXiv 2602.01469).

    The row of the newest token predicts the next one. Rows of mask tokens follow it, which are read
    together with one learnt state, and each of them predicts one more token.

    Attributes:
        mask_token_id: the token of these rows.
        mask_state: ``[state_size]`` the state that they are read with.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layers: list[LayerShape],
        state_layers: tuple[int, ...],
        target_ids: Tensor,
        target: PackedModel,
        mask_token_id: int,
        mask_state: Tensor,
    ) -> None:
        """Take over a head. Its linear layers lose their weights.

        Args:
            spec, layers, state_layers, target_ids, target: see :class:`HeadModel`.
            mask_token_id: the token that stands for those to be predicted.
            mask_state: ``[1, 1, state_size]`` what stands for their states.
        """
        super().__init__(spec, layers, state_layers, target_ids, target)
        self.mask_token_id, self.mask_state = mask_token_id, mask_state.flatten()
