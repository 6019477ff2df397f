"""Whether looking for continuations beside a draft model is worth the time that it takes.

A continuation helps in the steps in which it is better than what the draft model is expected to
draft. Looking for it takes time in all of them. So both are averaged over the steps that look, at
each batch size. Where looking costs more than it saves, few steps look, in case the text changes. A
batch size that is new begins with the averages of the nearest known one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwise.policies.nearest import record_of
from draftwise.policies.recent_mean import RecentMean

# Where looking does not pay, one of so many steps looks. It has no common factor with the number of
# steps between two that are learnt from, so that some of these do not look.
_LOOK_EVERY = 7
# All steps look until so many are known; then a step has the weight 1 / this in the averages.
_MEMORY = 32
# The averages of the nearest known batch size count as so many steps.
_PRIOR_STEPS = 8


class LookingValue:
    """Compares what looking for continuations saves with what it costs."""

    def __init__(self) -> None:
        """Start without any step."""
        self._records: dict[int, _Record] = {}

    def looks(self, num_requests: int) -> bool:
        """Whether the coming step looks for continuations. Call it once per step, or never.

        It depends on earlier steps only.

        Args:
            num_requests: number of requests that gain tokens in the step, at least 1.
        """
        record = self._record(num_requests)
        record.num_steps += 1
        return record.pays or record.num_steps % _LOOK_EVERY == 0

    def observe(self, num_requests: int, saved: float, seconds: float, usual: float) -> None:
        """Record a step that looked.

        Args:
            num_requests: number of requests that gain tokens in the step.
            saved: seconds that the best use of the continuations is expected to save.
            seconds: duration of looking and choosing.
            usual: duration of a step without drafts, by the cost model. Only what is relative to it
                is alike at other batch sizes.
        """
        record = self._record(num_requests)
        record.saved.observe(saved / usual)
        record.seconds.observe_duration(seconds / usual)

    def _record(self, num_requests: int) -> _Record:
        """What is known at a batch size. Similar ones share it."""
        return record_of(
            self._records,
            num_requests,
            lambda record: record.is_measured,
            lambda known: _Record() if known is None else known.as_prior(),
        )


@dataclass
class _Record:
    """Steps of similar batch sizes.

    Attributes:
        num_steps: number of steps that asked.
        saved, seconds: averages over recent steps that looked, relative to steps without drafts.
        has_prior: whether it began with the averages of another batch size.
    """

    num_steps: int = 0
    saved: RecentMean = field(default_factory=lambda: RecentMean(_MEMORY))
    seconds: RecentMean = field(default_factory=lambda: RecentMean(_MEMORY))
    has_prior: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether enough steps looked here."""
        return self.saved.count >= _MEMORY

    @property
    def pays(self) -> bool:
        """Whether looking saves more than it costs, or too little is known."""
        is_known = self.has_prior or self.is_measured
        return not is_known or self.saved.value > self.seconds.value

    def as_prior(self) -> _Record:
        """The beginning of another batch size."""
        saved, seconds = (each.as_prior(_PRIOR_STEPS) for each in (self.saved, self.seconds))
        return _Record(saved=saved, seconds=seconds, has_prior=True)
