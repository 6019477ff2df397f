"""``block``: a head that reads the target's hidden states drafts a block of tokens in one pass."""

from __future__ import annotations

from draftwise.engine.drafting.block import BlockBackend
from draftwise.engine.drafting.loop import DraftingBackend
from draftwise.engine.drafting.native_block import NativeBlockBackend
from draftwise.engine.one_pass_head import OnePassHead
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.by_name import register
from draftwise.engine.proposers.model import ModelProposer


@register
class BlockProposer(ModelProposer):
    """A head of DFlash, DFlash-2, DSpark or P-EAGLE.

    Tokens that are independent of each other do not make a likely text when each is drawn. So a
    head of DFlash or P-EAGLE proposes the most likely tokens, with certainty. With a Markov head or
    a selector, tokens are drawn from left to right, each given those before.
    """

    name = "block"
    summary = "a head that reads the target's hidden states drafts a block in one pass"
    drafts_trees = False

    def __init__(self, context: ProposerContext) -> None:
        """Set up.

        Args:
            context: the context, with a head that drafts blocks as its draft model.
        """
        assert isinstance(context.draft_model, OnePassHead)
        super().__init__(context)
        default = "one-hot" if context.draft_model.are_independent else "sampled"
        self.is_certain = (context.proposals or default) == "one-hot"

    def _new_backends(self) -> list[DraftingBackend]:
        """Native kernels where there are any, and a backend that supports every step."""
        model = self.cached_model
        assert isinstance(model, OnePassHead)
        return [NativeBlockBackend(model), BlockBackend(model)]
