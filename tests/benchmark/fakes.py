"""Contenders with canned answers, and their inputs."""

from draftwise.benchmark.contenders import Turn
from draftwise.benchmark.recorder import StepRecords
from draftwise.errors import PeerError


class Fake:
    """Answers with a fixed token; every turn reports a configured duration."""

    def __init__(
        self,
        name,
        seconds=1.0,
        token=7,
        fails_at=None,
        largest=None,
        records=None,
        learns=False,
    ):
        self.name = name
        self.learns = learns
        self.seconds = seconds
        self.token = token
        self.calls = []
        self._fails_at = fails_at
        self._largest = largest
        self._records = records

    def refusal(self, batch_size, params):
        fits = self._largest is None or batch_size <= self._largest
        return None if fits else f"answers at most {self._largest} prompts"

    def generate(self, prompts, params):
        if self._fails_at is not None and len(self.calls) >= self._fails_at:
            raise PeerError(self.name, "fell over")
        self.calls.append((prompts, params))
        answers = [[self.token] * each.max_tokens for each in params]
        return Turn(self.seconds, answers, records=self._records)

    def describe(self):
        return {"engine": "fake"}

    def close(self):
        self.calls.append("closed")


def records(**values):
    """Step records with some values."""
    made = StepRecords()
    for name, value in values.items():
        setattr(made, name, value)
    return made
