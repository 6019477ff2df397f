"""``exit``: the target's first layers draft tokens."""

from __future__ import annotations

from draftwise.engine.batch import Batch
from draftwise.engine.cached_exit import CachedExit
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.loop import DraftingBackend
from draftwise.engine.drafting.native_exit import NativeExitBackend
from draftwise.engine.proposers.by_name import register
from draftwise.engine.proposers.model import ModelProposer


@register
class ExitProposer(ModelProposer):
    """The target's first layers, its final norm and its head, drafting token by token.

    Self-speculation of LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710). The target's
    verification continues from the states that the drafting passes left; see
    :class:`draftwise.engine.kept_states.KeptStates`.
    """

    name = "exit"
    summary = "the target's first layers draft tokens"
    drafts_trees = False

    def _new_backends(self) -> list[DraftingBackend]:
        """Native kernels where there are any, and passes that support every step."""
        assert isinstance(self.cached_model, CachedExit)
        return [NativeExitBackend(self.cached_model), EagerBackend(self.cached_model)]

    def must_read(self, batch: Batch) -> bool:
        """False: the target reads all that is not drafted."""
        return False
