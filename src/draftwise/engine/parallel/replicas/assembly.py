"""Parts of an engine whose draft and companion run in several processes."""

from __future__ import annotations

from typing import Any

from draftwise.engine.assembly import Assembly
from draftwise.engine.companion import Companion
from draftwise.engine.parallel.replicas.processes import Replicas
from draftwise.engine.parallel.replicas.proposer import ReplicatedProposer
from draftwise.engine.parallel.replicas.replicated_companion import ReplicatedCompanion
from draftwise.engine.parallel.replicas.shares import Shares
from draftwise.engine.proposers import Proposer
from draftwise.errors import InvalidParameterError
from draftwise.policies import Policy


class ReplicaAssembly(Assembly):
    """Creates the parts of an engine with replicas."""

    def __init__(self, replicas: Replicas, *args: Any, **settings: Any) -> None:
        """Set up; see :class:`Assembly` for the other arguments.

        Args:
            replicas: the replica processes.
            args: as in :class:`Assembly`.
            settings: as in :class:`Assembly`.
        """
        super().__init__(*args, **settings)
        assert self._draft_model is not None
        self._shares = Shares(replicas, self._draft_model, self._companion_model)

    def check(self, policy: Policy) -> None:
        """Raise an error for what replicas cannot draft.

        Raises:
            InvalidParameterError: names ``draft_replicas``, or ``tree_width`` above 1.
        """
        if policy.uses_target_oracle:
            raise InvalidParameterError(
                "draft_replicas", f"policy {policy.name!r} uses the target while it drafts"
            )
        if self.speculation.tree_width > 1:
            raise InvalidParameterError("tree_width", "replicas draft chains only; set it to 1")

    def num_prefix_blocks(self) -> int:
        """None: the caches of replicas are in other processes."""
        return 0

    def proposer(self) -> Proposer:
        """Create the replicated proposer."""
        return ReplicatedProposer(self.proposer_context(), self._shares)

    def companion(self) -> Companion | None:
        """Create the replicated companion; ``None`` without a companion model."""
        if self._companion_model is None:
            return None
        return ReplicatedCompanion(self._shares, self._vocab_size)
