"""What is known about one architecture, format or layout."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What happens with a model.

    ``EQUAL``: it gives the tokens and log-probabilities of the reference. ``REFUSED``: it is
    refused at load with a typed error. ``NOT_BUILDABLE``: ``transformers`` cannot build or run a
    tiny model here. ``UNEQUAL`` and ``CRASHED`` are faults: it gives others, or another error.
    """

    EQUAL = "equal"
    REFUSED = "refused"
    NOT_BUILDABLE = "not buildable"
    UNEQUAL = "unequal"
    CRASHED = "crashed"


FAULTS = (Verdict.UNEQUAL, Verdict.CRASHED)
# Longest reason in a table.
_LONGEST = 160


@dataclass(frozen=True)
class Result:
    """The verdict on one architecture, format or layout.

    Attributes:
        kind: what was examined: ``"causal"``, ``"image-text"``, …
        name: its name, such as a model type.
        verdict: the verdict.
        reason: why it is not equal, shortened, or a remark; may be empty.
        details: the whole reason, with a traceback if there is one.
    """

    kind: str
    name: str
    verdict: Verdict
    reason: str = ""
    details: str = ""


class NotBuildableError(Exception):
    """``transformers`` cannot build or run a tiny model of an architecture here."""


class RefusedError(Exception):
    """Draftwise refuses a model at load with a typed error."""


class UnequalError(Exception):
    """A model gives other tokens or log-probabilities than the reference."""


_VERDICTS = {
    NotBuildableError: Verdict.NOT_BUILDABLE,
    RefusedError: Verdict.REFUSED,
    UnequalError: Verdict.UNEQUAL,
}


def judge(kind: str, name: str, examine: Callable[[], str]) -> Result:
    """The verdict on what an examination returns or raises.

    Args:
        kind: what is examined.
        name: its name.
        examine: returns a remark, which may be empty, or raises one of the errors above. Any other
            exception is a fault of Draftwise.
    """
    try:
        return Result(kind, name, Verdict.EQUAL, examine())
    except Exception as error:
        verdict = _VERDICTS.get(type(error), Verdict.CRASHED)
        reason = described(error) if verdict is Verdict.CRASHED else one_line(str(error))
        return Result(kind, name, verdict, shortened(reason), details(reason, error))


def described(error: BaseException) -> str:
    """An exception in one line."""
    text = one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def details(reason: str, error: BaseException) -> str:
    """A reason and the traceback of its exception."""
    return "\n".join([reason, *traceback.format_exception(error)])


def one_line(text: str) -> str:
    """A text without line breaks."""
    return " ".join(text.split())


def shortened(text: str) -> str:
    """A text that fits a table."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1].rstrip() + "…"
