"""How the ways of running a batch kept what they promised, at one batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwise.core.goodput import OperatingPoint, Promise

# Share of an old step that counts after one more in the same way. Promised seconds follow the
# machine themselves (see draftwise.core.latency.LiveCost), so that only the latest can be compared.
_FORGETTING_SECONDS = 0.98
_FORGETTING_TOKENS = 0.998
# Share that is left of what is known after a step: machine and workload drift.
_FADING = 0.998
# Steps, and requests' steps, that outweigh what is known from other ways. How long a step takes is
# seen at once, what it gains is mostly chance.
_DOUBT_SECONDS = 8.0
_DOUBT_TOKENS = 256.0
# One way, however long in use, tells no more about the others than so many steps, and no more than
# such a factor: the machine may have been disturbed while it was tried.
_MOST_TELLING = 8.0
_LARGEST_HINT = 1.25
# What is usual of ways with a threshold: their signals and their selection take time in every step.
_RAGGED_SECONDS = 1.015
# Steps that make a way half known, and how much better one that was never tried may be.
_HALF_KNOWN = 12.0
_CURIOSITY = 0.05
# A pause of the machine is not a property of the step.
_MOST_EXTREME = 3.0


@dataclass
class _Ratio:
    """Realised over promised, with forgetting."""

    steps: float = 0.0
    realised: float = 0.0
    promised: float = 0.0

    def observe(self, realised: float, promised: float, forgetting: float) -> None:
        self.fade(forgetting)
        self.steps += 1.0
        self.realised += realised
        self.promised += promised

    def fade(self, share: float) -> None:
        self.steps *= share
        self.realised *= share
        self.promised *= share

    @property
    def value(self) -> float:
        return self.realised / self.promised if self.promised else 1.0


@dataclass
class Experience:
    """What came of each way of running, against what it promised.

    The ratios of realised to promised tokens and seconds are known of a way by itself as far as it
    was used, and from ways of its kind (with or without a threshold) as far as it was not. One kind
    says nothing of the other: a disappointment with one is a reason to try the other.
    """

    _tokens: dict[OperatingPoint, _Ratio] = field(default_factory=dict)
    _seconds: dict[OperatingPoint, _Ratio] = field(default_factory=dict)

    def observe(
        self, point: OperatingPoint, promise: Promise, tokens: float, seconds: float
    ) -> None:
        """What came of a step.

        Args:
            point: how it was run.
            promise: of it.
            tokens: gained, expected rather than drawn: less noise.
            seconds: it took.
        """
        took = self._seconds.setdefault(point, _Ratio())
        if took.steps:
            seconds = min(seconds, _MOST_EXTREME * promise.seconds * took.value)
        took.observe(seconds, promise.seconds, _FORGETTING_SECONDS)
        # Without a draft nothing is to be learnt of what drafts gain.
        if point.max_length:
            gained = self._tokens.setdefault(point, _Ratio())
            gained.observe(tokens, promise.tokens, _FORGETTING_TOKENS)

    @property
    def num_steps(self) -> float:
        """Steps that are remembered."""
        return sum(ratio.steps for ratio in self._seconds.values())

    def fade(self, num_steps: int) -> None:
        """Believe a little less of everything, after so many steps."""
        for ratio in (*self._tokens.values(), *self._seconds.values()):
            ratio.fade(_FADING**num_steps)

    def optimism(self, point: OperatingPoint) -> float:
        """Factor by which a way may be better than it seems, 1 if it is well known."""
        took = self._seconds.get(point)
        steps = 0.0 if took is None else took.steps
        return 1.0 + _CURIOSITY / (1.0 + steps / _HALF_KNOWN)

    def corrected(self, point: OperatingPoint, promise: Promise, num_requests: int) -> Promise:
        """What a way will bring and cost, by what came of its like."""
        usual = {False: 1.0, True: _RAGGED_SECONDS}
        selects = point.threshold > 0
        took = [
            (each, r.steps, r.value / usual[each.threshold > 0])
            for each, r in self._seconds.items()
        ]
        gained = [(each, ratio.steps, ratio.value) for each, ratio in self._tokens.items()]
        seconds = _pooled(point, took, _DOUBT_SECONDS) * usual[selects]
        tokens = _pooled(point, gained, _DOUBT_TOKENS / num_requests) if point.max_length else 1.0
        return Promise(promise.tokens * tokens, promise.seconds * seconds, promise.size)


def _pooled(
    point: OperatingPoint, seen: Sequence[tuple[OperatingPoint, float, float]], doubt: float
) -> float:
    """A ratio for ``point`` from ``(way, steps, ratio)``: from its kind, then itself."""
    selects = point.threshold > 0
    like = [
        (min(steps, _MOST_TELLING), min(max(ratio, 1 / _LARGEST_HINT), _LARGEST_HINT))
        for each, steps, ratio in seen
        if (each.threshold > 0) == selects
    ]
    own = [(steps, ratio) for each, steps, ratio in seen if each == point]
    pooled = 1.0
    for counted in (like, own):
        weight = sum(steps for steps, _ in counted)
        total = sum(steps * ratio for steps, ratio in counted)
        pooled = (total + doubt * pooled) / (weight + doubt)
    return pooled
