"""Counts of drafted tokens that a server publishes, for all its clients, by vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# Draftwise and llama.cpp have vLLM's names, and Draftwise a name of its own for what vLLM does not
# count.
_SAMPLE = re.compile(
    r"^(?:(?:vllm|llamacpp):spec_decode_num|draftwise)[:_]"
    r"(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos|verified_tokens_per_pos)"
    r"(?:_total)?(?:\{([^}]*)\})? (\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """Counts of drafted tokens.

    Attributes:
        num_drafts: drafts of which tokens were verified.
        num_verified: drafted tokens that were verified.
        num_accepted: those that were accepted.
        accepted: accepted tokens by position in the draft, from 0.
        verified: verified tokens by position in the draft; empty if the server does not say.
    """

    num_drafts: int
    num_verified: int
    num_accepted: int
    accepted: Mapping[int, int] = field(default_factory=dict)
    verified: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> DraftCounts | None:
        """The counts in metrics of Prometheus' text format; ``None`` if they have none.

        The counts of several engines or models are added.
        """
        totals: dict[str, int] = {}
        positions: dict[str, dict[int, int]] = {}
        for name, labels, value in _SAMPLE.findall(text):
            position = _POSITION.search(labels)
            if position is None:
                totals[name] = totals.get(name, 0) + round(float(value))
                continue
            counts = positions.setdefault(name, {})
            place = int(position[1])
            counts[place] = counts.get(place, 0) + round(float(value))
        if "draft_tokens" not in totals or "accepted_tokens" not in totals:
            return None
        return cls(
            totals.get("drafts", 0),
            totals["draft_tokens"],
            totals["accepted_tokens"],
            positions.get("accepted_tokens_per_pos", {}),
            positions.get("verified_tokens_per_pos", {}),
        )

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """What was counted after other counts."""
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_verified - earlier.num_verified,
            self.num_accepted - earlier.num_accepted,
            {at: count - earlier.accepted.get(at, 0) for at, count in self.accepted.items()},
            {at: count - earlier.verified.get(at, 0) for at, count in self.verified.items()},
        )

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_verified + other.num_verified,
            self.num_accepted + other.num_accepted,
            _added(self.accepted, other.accepted),
            _added(self.verified, other.verified),
        )

    def acceptance_by_position(self) -> dict[int, float]:
        """Share of the drafts whose token at each position was accepted, by position from 0.

        The share is that of the tokens that were verified at the position, or if the server does
        not count them, that of all drafts, which may be shorter.
        """
        totals = self.verified or dict.fromkeys(self.accepted, self.num_drafts)
        return {
            at: self.accepted.get(at, 0) / total for at, total in sorted(totals.items()) if total
        }


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {at: one.get(at, 0) + other.get(at, 0) for at in {**one, **other}}
