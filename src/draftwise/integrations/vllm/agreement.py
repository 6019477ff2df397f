"""Decisions that the processes of one model share.

With tensor parallelism, several processes run the same passes, and the passes wait for each other.
Only the first process asks its policy: estimates and measured times differ between processes, so
that two policies could decide differently. The others follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Decision = TypeVar("Decision")


class Agreement(Protocol):
    """Makes the decisions of the first process known to all processes that run one model."""

    @property
    def leads(self) -> bool:
        """Whether this process decides. The others get its decisions."""

    def __call__(self, decide: Callable[[], Decision]) -> Decision:
        """The common decision. All processes call it at the same point.

        Args:
            decide: makes the decision; called in the process that leads.
        """


class Alone:
    """The agreement of a process that runs its model alone."""

    leads = True

    def __call__(self, decide: Callable[[], Decision]) -> Decision:
        """See :class:`Agreement`."""
        return decide()
