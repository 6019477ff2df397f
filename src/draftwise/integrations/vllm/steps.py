"""A step of another engine: who is in it, what is sent to the target, and what became of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draftwise.core.types import Outcome, StepTimes


@dataclass(frozen=True)
class Member:
    """A request of a step.

    Attributes:
        name: by which the engine knows it.
        num_tokens: tokens so far, prompt and output.
        num_output_tokens: tokens generated so far.
        room: most tokens that may be drafted; 0 while its prompt is being processed.
        greedy: whether it is decoded at temperature 0.
    """

    name: str
    num_tokens: int
    num_output_tokens: int
    room: int
    greedy: bool


@dataclass(frozen=True)
class Verified:
    """What became of what was sent of a request.

    Attributes:
        num_sent: drafted tokens that the target verified: of those sent the engine may have left
            some out.
        num_accepted: of these.
    """

    num_sent: int
    num_accepted: int


def verified_of(
    names: Sequence[str], sent: Sequence[int], gained: Sequence[int]
) -> dict[str, Verified]:
    """What became of what was sent, by request; of those that gained nothing nothing is known.

    Args:
        names: of the requests.
        sent: drafted tokens of each that the target verified.
        gained: tokens of each, the one after the accepted ones included.
    """
    return {
        name: Verified(length, min(length, count - 1))
        for name, length, count in zip(names, sent, gained, strict=True)
        if count
    }


@dataclass(frozen=True)
class Settled:
    """What became of a step, of the requests that are still there.

    Attributes:
        num_drafted: tokens, of all requests that the step had.
        num_sent: of these to the target.
        num_verified: drafted tokens that the target verified, of each request.
        num_accepted: of these, of each request.
        judged: whether a companion was asked.
        expected_tokens: that the policy expected the requests to gain; as many as they gained where
            it expects nothing.
        times: where its time went.
    """

    num_drafted: int
    num_sent: int
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    judged: bool
    expected_tokens: float
    times: StepTimes


@dataclass(frozen=True)
class Sent:
    """A step whose outcome is not known yet.

    Attributes:
        members: its requests.
        num_drafted: tokens, of each.
        lengths: how many of these were sent to the target.
        watched: whether signals of the draft were computed.
        judged: whether a companion was asked.
        draft_seconds, companion_seconds, select_seconds: where its time went.
        expected: accepted tokens that the policy expects of each; ``None`` if it expects nothing.
    """

    members: list[Member]
    num_drafted: tuple[int, ...]
    lengths: tuple[int, ...]
    watched: bool
    judged: bool
    draft_seconds: float
    companion_seconds: float
    select_seconds: float
    expected: list[float] | None

    def became(self, verified: Mapping[str, Verified]) -> list[Verified | None]:
        """What became of each request.

        Args:
            verified: by request; those that are missing ended, or were put aside.

        Returns:
            ``None`` for who is missing, or was given other tokens than were sent.
        """
        found = [verified.get(member.name) for member in self.members]
        return [
            None if fate is None or fate.num_sent > length else fate
            for fate, length in zip(found, self.lengths, strict=True)
        ]

    def outcome(self, fates: Sequence[Verified | None]) -> Outcome:
        """What a policy is told, of fates as :meth:`became` gives them."""
        lengths = tuple(0 if fate is None else fate.num_sent for fate in fates)
        accepted = tuple(0 if fate is None else fate.num_accepted for fate in fates)
        # All that is seen is whether a token was accepted, and of the first that was not that.
        place = torch.arange(max(self.num_drafted, default=0))
        acceptance = (place < torch.tensor(accepted).unsqueeze(1)).float()
        return Outcome(
            self.num_drafted,
            lengths,
            accepted,
            (0,) * len(fates),
            acceptance,
            frozenset(index for index, fate in enumerate(fates) if fate is None),
            acceptance.cumprod(dim=1),
            tuple(min(n, m + 1) for n, m in zip(lengths, accepted, strict=True)),
        )

    def times(self, seconds: float, num_prompt_tokens: int, shared: bool) -> StepTimes:
        """Where the time of the step went.

        Args:
            seconds: from the beginning of its draft to that of the next one.
            num_prompt_tokens: that the target processed beside.
            shared: whether the target's pass had tokens of others, or lacked some of these.
        """
        told = self.draft_seconds + self.companion_seconds + self.select_seconds
        return StepTimes(
            draft=self.draft_seconds,
            companion=self.companion_seconds,
            select=self.select_seconds,
            verify=max(seconds - told, 0.0),
            accept=0.0,
            rest=0.0,
            num_prompt_tokens=num_prompt_tokens,
            shared=shared,
        )

    def settled(self, outcome: Outcome, times: StepTimes) -> Settled:
        """What became of the step as a whole."""
        known = [row for row in range(len(self.members)) if row not in outcome.failed]
        gained = sum(outcome.num_accepted) + len(known)
        expected = self.expected
        return Settled(
            sum(self.num_drafted),
            sum(self.lengths),
            tuple(outcome.num_verified[row] for row in known),
            tuple(outcome.num_accepted[row] for row in known),
            self.judged,
            gained if expected is None else sum(1 + expected[row] for row in known),
            times,
        )
