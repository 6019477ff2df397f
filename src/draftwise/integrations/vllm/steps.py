"""The data of one step of another engine: its requests, the drafts sent, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draftwise.core.types import Outcome, StepTimes


@dataclass(frozen=True)
class RequestView:
    """A request of a step.

    Attributes:
        name: the engine's id of the request.
        num_tokens: tokens so far, prompt and output.
        num_output_tokens: tokens generated so far.
        room: maximum number of tokens to draft; 0 while the prompt is being processed.
        greedy: whether it is decoded at temperature 0.
    """

    name: str
    num_tokens: int
    num_output_tokens: int
    room: int
    greedy: bool


@dataclass(frozen=True)
class Verified:
    """The verification result of one request's draft.

    Attributes:
        num_verified: drafted tokens that the target verified. The engine may have dropped some of
            those that were sent.
        num_accepted: accepted tokens among them.
    """

    num_verified: int
    num_accepted: int


def verified_by_request(
    names: Sequence[str], num_verified: Sequence[int], num_gained: Sequence[int]
) -> dict[str, Verified]:
    """The verification results of the requests that gained tokens.

    Args:
        names: ids of the requests.
        num_verified: drafted tokens of each request that the target verified.
        num_gained: tokens that each request gained, including the one after the accepted ones.
    """
    return {
        name: Verified(length, min(length, count - 1))
        for name, length, count in zip(names, num_verified, num_gained, strict=True)
        if count
    }


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. Lists contain the requests that are still running.

    Attributes:
        num_drafted: drafted tokens of all requests of the step.
        num_sent: drafted tokens sent to the target.
        num_verified: drafted tokens of each request that the target verified.
        num_accepted: accepted tokens of each request.
        scored: whether a companion scored the draft.
        times: times of the step's parts.
    """

    num_drafted: int
    num_sent: int
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    scored: bool
    times: StepTimes


@dataclass(frozen=True)
class PendingStep:
    """A step whose drafts were sent to the target and whose outcome is not known yet.

    Attributes:
        views: the requests of the step.
        num_drafted: drafted tokens of each request.
        lengths: drafted tokens of each request that were sent to the target.
        num_passes: passes of the draft model; 0 without a draft model.
        has_signals: whether signals of the draft model were computed.
        scored: whether a companion scored the draft.
        draft_seconds, companion_seconds, select_seconds: times of the step's parts.
        copied: indices of requests whose tokens were copied in place of a draft.
        looked_for_copies: whether ``draft_seconds`` contains a search for continuations beside the
            passes of a draft model.
        looking_seconds: time of this search.
    """

    views: list[RequestView]
    num_drafted: tuple[int, ...]
    lengths: tuple[int, ...]
    num_passes: int
    has_signals: bool
    scored: bool
    draft_seconds: float
    companion_seconds: float
    select_seconds: float
    copied: frozenset[int] = frozenset()
    looked_for_copies: bool = False
    looking_seconds: float = 0.0

    def results(self, verified: Mapping[str, Verified]) -> list[Verified | None]:
        """The verification result of each request.

        Args:
            verified: results by request. Requests that ended or were preempted are missing.

        Returns:
            ``None`` for requests that are missing or had other tokens verified than were sent.
        """
        found = [verified.get(view.name) for view in self.views]
        return [
            None if each is None or each.num_verified > length else each
            for each, length in zip(found, self.lengths, strict=True)
        ]

    def outcome(self, results: Sequence[Verified | None]) -> Outcome:
        """The outcome that the policy observes.

        Args:
            results: the return value of :meth:`results`.
        """
        lengths = tuple(0 if each is None else each.num_verified for each in results)
        accepted = tuple(0 if each is None else each.num_accepted for each in results)
        # The engine reports which tokens were accepted, not their acceptance probabilities. So
        # acceptance is known up to and including the first rejected token, as 1 or 0.
        position = torch.arange(max(self.num_drafted, default=0))
        acceptance = (position < torch.tensor(accepted).unsqueeze(1)).float()
        return Outcome(
            self.num_drafted,
            lengths,
            accepted,
            (0,) * len(results),
            acceptance,
            frozenset(index for index, each in enumerate(results) if each is None),
            acceptance.cumprod(dim=1),
            tuple(min(n, m + 1) for n, m in zip(lengths, accepted, strict=True)),
            tuple(index in self.copied for index in range(len(results))),
        )

    def times(self, seconds: float, num_prompt_tokens: int, shared: bool) -> StepTimes:
        """The times of the step's parts.

        Args:
            seconds: time from the start of this step's draft to the start of the next one's.
            num_prompt_tokens: prompt tokens in the target's pass.
            shared: whether the target's pass had tokens of other requests, or lacked some of these.
        """
        measured = self.draft_seconds + self.companion_seconds + self.select_seconds
        return StepTimes(
            draft=self.draft_seconds,
            companion=self.companion_seconds,
            select=self.select_seconds,
            verify=max(seconds - measured, 0.0),
            accept=0.0,
            rest=0.0,
            num_prompt_tokens=num_prompt_tokens,
            disturbed=shared,
            looking=self.looking_seconds,
        )

    def result(self, outcome: Outcome, times: StepTimes) -> StepResult:
        """The result of the step as a whole."""
        known = [row for row in range(len(self.views)) if row not in outcome.failed]
        return StepResult(
            sum(self.num_drafted),
            sum(self.lengths),
            tuple(outcome.num_verified[row] for row in known),
            tuple(outcome.num_accepted[row] for row in known),
            self.scored,
            times,
        )
