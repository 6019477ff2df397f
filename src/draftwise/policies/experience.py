"""How long the ways of running a batch took against what they promised, at one batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from draftwise.core.goodput import OperatingPoint, Promise

# Share that is left of what is known of a way after a step: the machine changes.
_FADING = 0.998
# Steps of a way that count at most against its next one: so quickly it is followed at least.
_MOST_STEPS = 150.0
# Steps that outweigh what is known from other ways.
_DOUBT = 4.0
# Steps of its own that outweigh the promise of a way: costs are known to a few per cent, and the
# steps of one trial scatter by more.
_TRUST = 8.0
# One way, however long in use, tells no more about the others than as many steps as are doubted,
# and no more than such a factor: the machine may have been disturbed while it was tried.
_LARGEST_HINT = 1.25
# Steps that make a way known well enough to tell from it how fast the machine is just now, and the
# share of a step's surprise that is put down to the machine: at all, and while ways take turns.
_WELL_KNOWN = 8.0
_SHARE_OF_MACHINE, _SHARE_IN_TURNS = 0.08, 0.25
# The first steps of all, and those after another way was in use, meet cold caches.
_FIRST_STEPS, _COLD_STEPS = 16, 1
# What signals and selection usually take in every step of a way with a threshold, at all and for
# each request.
_SELECTION_SECONDS, _SELECTION_SECONDS_EACH = 0.0003, 0.00006
# How far off the mean time of n steps may be, times √n, disturbances included.
_UNCERTAINTY = 0.1
# A pause of the machine is not a property of the step: so much of it is believed at most, of the
# first way of all and of others; but more and more of surprises that agree.
MOST_EXTREME = 3.0
_EXTREME = 1.1
_MORE = 1.5

Kind = tuple[bool, bool]


@dataclass
class _Slowness:
    """Log of realised over promised seconds of a way, the machine's own pace taken off.

    Attributes:
        mean: of its steps.
        weight: steps that count.
        limit: how large a surprise is believed, of the sign of the latest one.
    """

    mean: float = 0.0
    weight: float = 0.0
    limit: float = 0.0

    def believed(self, surprise: float) -> float:
        """So much of a surprise as may be more than a pause of the machine."""
        agrees = surprise * self.limit > 0
        limit = abs(self.limit) if agrees else math.log(_EXTREME)
        believed = math.copysign(min(abs(surprise), limit), surprise)
        limit = limit * _MORE if abs(surprise) > limit else math.log(_EXTREME)
        self.limit = math.copysign(limit, surprise)
        return believed


class Experience:
    """How long steps took in each way of running at one batch size, against what their work costs.

    The log of realised over expected seconds is the way's own slowness plus the pace of the machine
    at the time. The pace is followed quickly, by ways that are well known; a way that is tried is
    compared with it, so that a machine that was disturbed for some seconds does not make the way
    that was in use look bad. A way's slowness is known by itself as far as it was used, and from
    ways of its kind (no draft, without a threshold, with one) as far as it was not. One kind says
    nothing of another: a disappointment with one is a reason to try the other.

    Attributes:
        rival: way that takes turns with the one in use, to be compared with it.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.rival: OperatingPoint | None = None
        self._ways: dict[OperatingPoint, _Slowness] = {}
        self._pace = 0.0
        self._num_paced = 0
        self._latest: OperatingPoint | None = None
        self._in_a_row = 0

    def observe(self, point: OperatingPoint, promise: Promise, seconds: float) -> None:
        """How long a step took.

        Args:
            point: how it was run.
            promise: of it, with the seconds that its work was expected to take: how many tokens it
                had is chance.
            seconds: it took; what is not a positive, finite number is ignored.
        """
        if not 0 < seconds < math.inf:
            return
        self._in_a_row = self._in_a_row + 1 if point == self._latest else 0
        self._latest = point
        if self._in_a_row < (_COLD_STEPS if self._ways else _FIRST_STEPS):
            return
        way = self._ways.setdefault(point, _Slowness())
        expected = promise.seconds + _selection_seconds(point, promise)
        surprise = math.log(seconds / expected) - self._pace - way.mean
        if self._num_paced:
            surprise = way.believed(surprise)
        else:
            limit = math.log(MOST_EXTREME)
            surprise = min(max(surprise, -limit), limit)
        if len(self._ways) == 1 or (way.weight >= _WELL_KNOWN and point != self.rival):
            # The first way of all is the measure of the others.
            self._num_paced += 1
            share = _SHARE_OF_MACHINE if self.rival is None else _SHARE_IN_TURNS
            share = max(share, 1 / self._num_paced)
            self._pace += share * surprise
            surprise *= 1 - share
        way.weight = min(way.weight, _MOST_STEPS) + 1.0
        way.mean += surprise / way.weight
        self._centre()

    @property
    def num_steps(self) -> float:
        """Steps that are remembered."""
        return sum(way.weight for way in self._ways.values())

    def fade(self, num_steps: int) -> None:
        """Believe a little less of all ways, after so many steps."""
        for way in self._ways.values():
            way.weight *= _FADING**num_steps

    def knows(self, point: OperatingPoint) -> bool:
        """Whether a way was tried, lately enough to count."""
        way = self._ways.get(point)
        return way is not None and way.weight >= _DOUBT

    def optimism(self, point: OperatingPoint) -> float:
        """Factor by which a way may be better than it seems, 1 if it is well known."""
        way = self._ways.get(point)
        steps = 0.0 if way is None else way.weight
        return 1.0 + _UNCERTAINTY / math.sqrt(steps + _DOUBT)

    def corrected(self, point: OperatingPoint, promise: Promise) -> Promise:
        """What a way will bring, and cost by what its like took."""
        seconds = promise.seconds + _selection_seconds(point, promise)
        return replace(promise, seconds=seconds * math.exp(self._pace + self._slowness(point)))

    def _centre(self) -> None:
        """Put down to the machine what all ways have in common: of others it is expected too."""
        total = sum(way.weight for way in self._ways.values())
        shared = sum(way.weight * way.mean for way in self._ways.values()) / total
        for way in self._ways.values():
            way.mean -= shared
        self._pace += shared

    def _slowness(self, point: OperatingPoint) -> float:
        """Of a way: from ways of its kind, then from itself."""
        limit = math.log(_LARGEST_HINT)
        total, total_weight = 0.0, _DOUBT
        for each, way in self._ways.items():
            if kind_of(each) == kind_of(point):
                weight = min(way.weight, _DOUBT)
                total += weight * min(max(way.mean, -limit), limit)
                total_weight += weight
        own = self._ways.get(point, _Slowness())
        return (own.weight * own.mean + _TRUST * total / total_weight) / (own.weight + _TRUST)


def _selection_seconds(point: OperatingPoint, promise: Promise) -> float:
    if point.threshold == 0:
        return 0.0
    return _SELECTION_SECONDS + _SELECTION_SECONDS_EACH * promise.requests


def kind_of(point: OperatingPoint) -> Kind:
    """Whether anything is drafted, and whether a threshold selects."""
    return point.max_length > 0, point.threshold > 0
