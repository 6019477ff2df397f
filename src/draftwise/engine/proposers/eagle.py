"""``eagle``: a head that reads the target's hidden states drafts tokens."""

from __future__ import annotations

from draftwise.engine.cached_head import CachedHead
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.loop import DraftingBackend
from draftwise.engine.drafting.native_head import NativeHeadBackend
from draftwise.engine.drafting.recorded import RecordedBackend
from draftwise.engine.proposers.by_name import register
from draftwise.engine.proposers.model import ModelProposer


@register
class EagleProposer(ModelProposer):
    """A head of EAGLE-1, EAGLE-2 or EAGLE-3 that drafts token by token.

    The sources are Li et al. 2024 (arXiv 2401.15077 and 2406.16858) and 2025 (arXiv 2503.01840).

    It follows the drafting loop of a draft model. What differs is what it reads: the target's
    states of the tokens that were kept, which the steps' commits bring.
    """

    name = "eagle"
    summary = "a head that reads the target's hidden states drafts tokens"

    def _new_backends(self) -> list[DraftingBackend]:
        """Native kernels or recorded steps where there are any, and passes that support all."""
        model = self.cached_model
        assert isinstance(model, CachedHead)
        return [NativeHeadBackend(model), RecordedBackend(model), EagerBackend(model)]
