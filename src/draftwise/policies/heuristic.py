"""A draft length per request that grows after full acceptance and shrinks otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from draftwise.core.types import Outcome, StepTimes
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import RequestState

_FIRST_LENGTH = 5
_GROWTH, _SHRINKAGE = 2, 1


class Heuristic(Policy):
    """Drafts two tokens more after full acceptance and one fewer otherwise.

    The length starts at 5 and is at least 1. This is ``num_assistant_tokens_schedule="heuristic"``
    of Hugging Face's assisted generation, with one length per request and
    ``num_speculative_tokens`` as the maximum.
    """

    name = "heuristic"
    summary = "per request, two tokens more after full acceptance, one fewer otherwise"
    source = "Hugging Face transformers, num_assistant_tokens_schedule='heuristic'"
    signals = frozenset({Signal.HISTORY})

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._lengths: dict[int, int] = {}
        self._step: list[int] = []

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """Each request's own length."""
        self._step = [request.request_id for request in requests]
        return DraftPlan([self._length(request) for request in self._step])

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Update the length of each request that drafted."""
        counts = zip(outcome.num_drafted, outcome.num_accepted, strict=True)
        for index, (drafted, accepted) in enumerate(counts):
            if drafted and index not in outcome.failed:
                request = self._step[index]
                change = _GROWTH if accepted == drafted else -_SHRINKAGE
                length = max(1, self._length(request) + change)
                self._lengths[request] = min(self.num_speculative_tokens, length)

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        for request in request_ids:
            self._lengths.pop(request, None)

    def _length(self, request: int) -> int:
        return self._lengths.get(request, min(_FIRST_LENGTH, self.num_speculative_tokens))
