"""What happened in the steps of a run: times, lengths, acceptance by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from draftwise.core.types import PARTS, StepTimes
from draftwise.engine.request import Request


@dataclass
class StepRecords:
    """Counts and times over steps; two are joined by :meth:`add`.

    Attributes:
        num_steps: steps of the engine.
        num_prompt_tokens: prompt tokens processed.
        num_request_steps: requests that gained tokens, summed over steps.
        num_tokens: tokens gained.
        num_drafted: tokens drafted.
        num_judged: drafted tokens that a companion judged.
        num_verified: tokens verified.
        num_accepted: verified tokens that were accepted.
        decode_seconds: of the steps that processed no prompt.
        decode_tokens: gained in them.
        seconds: by part of a step, over all steps.
        verified_lengths: how often a request had so many tokens verified in a step.
        tested: how often the verified token at a position was reached.
        accepted: how often it was accepted then.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_request_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_judged: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    verified_lengths: Counter[int] = field(default_factory=Counter)
    tested: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, other: StepRecords) -> None:
        """Count another run's steps too."""
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update(others)
            else:
                setattr(self, each.name, mine + others)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the verified tokens that were accepted, of those that were reached."""
        return [self.accepted[i] / self.tested[i] for i in range(len(self.tested))]


class Recorder:
    """Follows a run from step to step.

    Attributes:
        records: what was seen so far.
        gains: tokens gained step by step, by request.
    """

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self.records = StepRecords()
        self.gains: dict[Request, list[int]] = {}
        self._seen: dict[Request, tuple[int, int, int, int, int]] = {}

    def take(self, requests: Sequence[Request], times: StepTimes) -> None:
        """Record a step.

        Args:
            requests: those that gained tokens or ended in it.
            times: where its time went.
        """
        records = self.records
        records.num_steps += 1
        records.num_prompt_tokens += times.num_prompt_tokens
        for part in PARTS:
            records.seconds[part] += getattr(times, part)
        gained = sum(self._take_request(request) for request in requests)
        records.num_tokens += gained
        if not times.num_prompt_tokens:
            records.decode_seconds += times.total
            records.decode_tokens += gained

    def _take_request(self, request: Request) -> int:
        stats, records = request.stats, self.records
        now = (
            stats.num_steps,
            stats.num_tokens,
            stats.num_drafted,
            stats.num_verified,
            stats.num_accepted,
        )
        before = self._seen.get(request, (0, 0, 0, 0, 0))
        self._seen[request] = now
        steps, tokens, drafted, verified, accepted = (
            b - a for a, b in zip(before, now, strict=True)
        )
        if not steps:
            return 0
        records.num_request_steps += 1
        records.num_drafted += drafted
        records.num_verified += verified
        records.num_accepted += accepted
        records.verified_lengths[verified] += 1
        records.tested.update(range(min(accepted + 1, verified)))
        records.accepted.update(range(accepted))
        self.gains.setdefault(request, []).append(tokens)
        return tokens

    def finish(self) -> StepRecords:
        """The records, with what is only known at the end."""
        self.records.num_judged = sum(request.stats.num_judged for request in self._seen)
        return self.records
