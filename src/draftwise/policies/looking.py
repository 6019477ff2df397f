"""Whether looking for continuations beside a draft model is worth the time that it takes.

A continuation helps in the steps in which it is better than what the draft model is expected to
draft. Looking for it takes time in all of them. So both are averaged over the steps that look, at
each batch size. Where looking costs more than it saves, few steps look, in case the text changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwise.policies.offers import batch_bucket

# Where looking does not pay, one of so many steps looks.
_LOOK_EVERY = 8
# All steps look until so many are known; then a step has the weight 1 / this in the averages.
_MEMORY = 32
# The time of looking is clipped to this factor of its average. A pause of the machine says nothing.
_MOST_UNUSUAL = 3.0


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
        record = self._records.setdefault(batch_bucket(num_requests), _Record())
        record.num_steps += 1
        return record.pays or record.num_steps % _LOOK_EVERY == 0

    def observe(self, num_requests: int, saved: float, seconds: float) -> None:
        """Record a step that looked.

        Args:
            num_requests: number of requests that gain tokens in the step.
            saved: seconds that the best use of the continuations is expected to save.
            seconds: duration of looking and choosing.
        """
        record = self._records.setdefault(batch_bucket(num_requests), _Record())
        if record.num_looks:
            seconds = min(seconds, _MOST_UNUSUAL * record.seconds)
        record.num_looks += 1
        weight = max(1.0 / record.num_looks, 1.0 / _MEMORY)
        record.saved += weight * (saved - record.saved)
        record.seconds += weight * (seconds - record.seconds)


@dataclass
class _Record:
    """Steps of similar batch sizes.

    Attributes:
        num_steps: number of steps that asked.
        num_looks: number of steps that looked.
        saved, seconds: recent averages over these.
    """

    num_steps: int = 0
    num_looks: int = 0
    saved: float = 0.0
    seconds: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether looking saves more than it costs, or too little is known."""
        return self.num_looks < _MEMORY or self.saved > self.seconds
