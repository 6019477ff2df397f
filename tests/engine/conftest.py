"""Decisions of engines in tests depend on given costs, and not on the speed of the machine."""

import pytest

from draftwise.kernels.native import library
from draftwise.policies.guard import Guard
from draftwise.policies.step_times import StepTimes


@pytest.fixture(autouse=True)
def _costs_as_given(monkeypatch):
    """No step is left without drafts to be measured, and measured times change nothing."""
    monkeypatch.setattr(Guard, "rests", lambda self, prices: False)
    monkeypatch.setattr(StepTimes, "observe", lambda self, kind, ratio: None)


@pytest.fixture
def operations(monkeypatch):
    """Passes by PyTorch's operations, as on a machine without a compiler."""
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))


@pytest.fixture(params=["kernels", "operations"])
def kernels(request):
    """Passes by native kernels, where there are any, and by PyTorch's operations."""
    if request.param == "operations":
        request.getfixturevalue("operations")
