"""Decisions of engines in tests depend on given costs, and not on the speed of the machine."""

import pytest

from draftwise.policies.guard import Guard
from draftwise.policies.step_times import StepTimes


@pytest.fixture(autouse=True)
def _costs_as_given(monkeypatch):
    """No step is left without drafts to be measured, and measured times change nothing."""
    monkeypatch.setattr(Guard, "rests", lambda self, prices: False)
    monkeypatch.setattr(StepTimes, "observe", lambda self, kind, ratio: None)
