"""Records of the steps of a run: times, lengths, and acceptance by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from draftwise.core.types import PARTS, StepTimes
from draftwise.engine.request import Request


@dataclass
class StepRecords:
    """Counts and times over steps.

    Attributes:
        num_steps: engine steps.
        num_prompt_tokens: processed prompt tokens.
        num_request_steps: requests that gained tokens, summed over steps.
        num_tokens: tokens gained.
        num_drafted: drafted tokens.
        num_scored: drafted tokens that a companion scored.
        num_verified: verified tokens.
        num_accepted: accepted tokens.
        decode_seconds: seconds of the steps that processed no prompt.
        decode_tokens: tokens gained in these steps.
        seconds: seconds by part of a step, over all steps.
        verified_lengths: number of request steps by number of verified tokens.
        tested: number of verified tokens by position whose predecessors were all accepted; empty
            for token trees.
        accepted: number of accepted tokens by position; empty for token trees.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_request_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_scored: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    verified_lengths: Counter[int] = field(default_factory=Counter)
    tested: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, other: StepRecords) -> None:
        """Add the records of another run."""
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update(others)
            else:
                setattr(self, each.name, mine + others)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Acceptance rate of the tested tokens at each position."""
        return [self.accepted[i] / self.tested[i] for i in range(len(self.tested))]


class Recorder:
    """Records the steps of a run.

    Attributes:
        records: records of the steps so far.
        gains: tokens gained in each step, by request.
    """

    def __init__(self, draws_chains: bool = True) -> None:
        """Start without steps.

        Args:
            draws_chains: whether drafts are chains. The tokens of a tree share their positions, so
                its acceptance by position is not recorded.
        """
        self._draws_chains = draws_chains
        self.records = StepRecords()
        self.gains: dict[Request, list[int]] = {}
        self._seen: dict[Request, tuple[int, int, int, int, int]] = {}

    def take(self, requests: Sequence[Request], times: StepTimes) -> None:
        """Record a step.

        Args:
            requests: requests that gained tokens or ended in the step.
            times: times of the step.
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
        if self._draws_chains:
            records.tested.update(range(min(accepted + 1, verified)))
            records.accepted.update(range(accepted))
        self.gains.setdefault(request, []).append(tokens)
        return tokens

    def finish(self) -> StepRecords:
        """Return the records, completed with the counts that are only known at the end."""
        self.records.num_scored = sum(request.stats.num_scored for request in self._seen)
        return self.records
