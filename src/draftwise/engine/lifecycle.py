"""The interface of components that keep state for each request, such as caches and proposers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from draftwise.engine.request import Request


class StateRows(NamedTuple):
    """Hidden states of the target at consecutive positions of a request.

    Attributes:
        start: the first position.
        source: ``[rows, size]`` the states that the proposer reads, side by side, of all tokens of
            a pass.
        first: row of the first position.
        length: number of positions.
    """

    start: int
    source: Tensor
    first: int
    length: int

    @property
    def rows(self) -> Tensor:
        """``[length, size]`` the states of the positions."""
        return self.source[self.first : self.first + self.length]


@dataclass(frozen=True)
class Commit:
    """The changes that one step made to its requests.

    Attributes:
        requests: all requests of the step, including those with only a prompt chunk. Some may have
            ended.
        starts: ``[requests]`` number of tokens before the step.
        num_drafted: ``[requests]`` number of leading draft tokens that the target verified
            unchanged. Tokens that a draft or companion model read after them are discarded.
        states: ``[requests]`` the target's hidden states at the positions that it has read in the
            step and that are kept; ``None`` where the proposer reads none. The newest token of a
            request was not read yet, so there is no state of it.
    """

    requests: Sequence[Request]
    starts: Sequence[int]
    num_drafted: Sequence[int]
    states: Sequence[StateRows | None]


class FollowsRequests(Protocol):
    """A component with state for each request.

    The scheduler calls :meth:`admit` before a request's first step, :meth:`commit` after each of
    its steps, and :meth:`retire` when it ends. It calls :meth:`recover` after a step that failed.
    """

    def admit(self, request: Request) -> None:
        """A request got a cache slot. Another request may have used the slot before."""

    def commit(self, commit: Commit) -> None:
        """A step ended: keep the accepted tokens and roll back the others."""

    def retire(self, request: Request) -> None:
        """A request ended. It still has its cache slot."""

    def recover(self, requests: Iterable[Request]) -> None:
        """Return to the state after the last commit. These requests will continue.

        Raises:
            EngineError: the state is lost, and the engine becomes unusable.
        """
