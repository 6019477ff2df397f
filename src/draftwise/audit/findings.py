"""What an audit finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Result of a check.

    ``NOTED`` is a difference that changes no distribution.
    """

    PASSED = "passed"
    FAILED = "failed"
    NOTED = "noted"
    NOT_AUDITED = "not audited"


@dataclass(frozen=True)
class Case:
    """The smallest case of a failure.

    Attributes:
        commands: commands of a shell that show it. The last one is the baseline's.
        expected: what the baseline says.
        found: what the audited server said.
    """

    commands: tuple[str, ...]
    expected: str
    found: str


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        check: name of the check.
        status: its result.
        detail: what was compared, or why it was not.
        case: the smallest case of a failure.
    """

    check: str
    status: Status
    detail: str
    case: Case | None = None


def passed(check: str, detail: str) -> Finding:
    """A check that passed."""
    return Finding(check, Status.PASSED, detail)


def failed(check: str, detail: str, case: Case) -> Finding:
    """A check that failed."""
    return Finding(check, Status.FAILED, detail, case)


def not_audited(check: str, reason: str) -> Finding:
    """A check that was not possible."""
    return Finding(check, Status.NOT_AUDITED, reason)


def counted(number: int, noun: str) -> str:
    """``1 answer``, ``2 answers``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
