"""How long the ways of running a batch took against what they promised, at one batch size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftwise.core.goodput import OperatingPoint, Promise

# Share of an old step that counts after one more in the same way. Promised seconds follow the
# machine themselves (see draftwise.core.latency.LiveCost), so that only the latest can be compared.
_FORGETTING = 0.98
# Share that is left of what is known of times after a step: the machine drifts.
_FADING = 0.9995
# Steps that outweigh what is known from other ways.
_DOUBT = 4.0
# One way, however long in use, tells no more about the others than as many steps as are doubted,
# and no more than such a factor: the machine may have been disturbed while it was tried.
_LARGEST_HINT = 1.25
# What signals and selection usually take in every step of a way with a threshold.
_SELECTION_SECONDS = 0.001
# Steps that make a way half known, and how much better one that was never tried may be.
_HALF_KNOWN = 4.0
_CURIOSITY = 0.08
# A pause of the machine is not a property of the step.
MOST_EXTREME = 3.0


@dataclass
class Ratio:
    """Realised over promised, with forgetting.

    Attributes:
        weight: observations that count, old ones less.
        realised: sum over them.
        promised: likewise.
    """

    weight: float = 0.0
    realised: float = 0.0
    promised: float = 0.0

    def observe(self, realised: float, promised: float, weight: float, forgetting: float) -> None:
        """Count one more; ``forgetting`` is the share of the old that still counts."""
        self.fade(forgetting)
        self.weight += weight
        self.realised += realised
        self.promised += promised

    def fade(self, share: float) -> None:
        """Let only a share count of what was observed."""
        self.weight *= share
        self.realised *= share
        self.promised *= share

    @property
    def value(self) -> float:
        """The ratio, 1 as long as nothing is known."""
        return self.realised / self.promised if self.promised else 1.0


Kind = tuple[bool, bool]


class Experience:
    """How long steps took in each way of running at one batch size, against what it promised.

    The ratio of realised to promised is known of a way by itself as far as it was used, and from
    ways of its kind (no draft, without a threshold, with one) as far as it was not. One kind says
    nothing of another: a disappointment with one is a reason to try the other.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._seconds: dict[OperatingPoint, Ratio] = {}

    def observe(self, point: OperatingPoint, promise: Promise, seconds: float) -> None:
        """How long a step took.

        Args:
            point: how it was run.
            promise: of it.
            seconds: it took.
        """
        took = self._seconds.setdefault(point, Ratio())
        promised = promise.seconds + _selection_seconds(point)
        if took.weight:
            seconds = min(seconds, MOST_EXTREME * promised * took.value)
        took.observe(seconds, promised, 1.0, _FORGETTING)

    @property
    def num_steps(self) -> float:
        """Steps that are remembered."""
        return sum(ratio.weight for ratio in self._seconds.values())

    def fade(self, num_steps: int) -> None:
        """Believe a little less of all times, after so many steps."""
        for ratio in self._seconds.values():
            ratio.fade(_FADING**num_steps)

    def optimism(self, point: OperatingPoint) -> float:
        """Factor by which a way may be better than it seems, 1 if it is well known."""
        took = self._seconds.get(point)
        steps = 0.0 if took is None else took.weight
        return 1.0 + _CURIOSITY / (1.0 + steps / _HALF_KNOWN)

    def corrected(self, point: OperatingPoint, promise: Promise) -> Promise:
        """What a way will bring, and cost by what its like took."""
        seconds = promise.seconds + _selection_seconds(point)
        return replace(promise, seconds=seconds * self._ratio(point))

    def _ratio(self, point: OperatingPoint) -> float:
        """Realised over promised seconds: from ways of its kind, then from itself."""
        total_weight = total = _DOUBT
        for each, ratio in self._seconds.items():
            if kind_of(each) == kind_of(point):
                weight = min(ratio.weight, _DOUBT)
                total += weight * min(max(ratio.value, 1 / _LARGEST_HINT), _LARGEST_HINT)
                total_weight += weight
        own = self._seconds.get(point, Ratio())
        return (own.weight * own.value + _DOUBT * total / total_weight) / (own.weight + _DOUBT)


def _selection_seconds(point: OperatingPoint) -> float:
    return _SELECTION_SECONDS if point.threshold > 0 else 0.0


def kind_of(point: OperatingPoint) -> Kind:
    """Whether anything is drafted, and whether a threshold selects."""
    return point.max_length > 0, point.threshold > 0
