"""The signals that are compared: which numbers a decision may use, and what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Need(StrEnum):
    """What has to run so that a signal is known."""

    NOTHING = "nothing"
    DRAFT = "the draft's signals"
    CONFIDENCE = "a confidence head"
    COMPANION = "a companion"
    TARGET = "the target"


# Columns of the records that depend on the drawn token. A decision about a token may use them only
# through a filtered proposal.
_OF_THE_TOKEN = {"token_prob", "agreement", "acceptance"}


@dataclass(frozen=True)
class Kind:
    """A set of signals.

    The position in the draft belongs to every set.

    Attributes:
        name: as in tables.
        columns: the columns of the records that are used to select what is verified.
        while_drafting: those that are known while the draft is written, which decide whether it
            goes on. A companion reads complete drafts only.
        need: what has to run.
    """

    name: str
    columns: tuple[str, ...]
    while_drafting: tuple[str, ...]
    need: Need

    @property
    def sees_token(self) -> bool:
        """Whether the selection depends on the drawn token, so that it needs a filter."""
        return bool(_OF_THE_TOKEN & set(self.columns))


# The draft's own signals that are known before the token is drawn.
_BEFORE = ("history", "top_prob", "entropy")

NONE = Kind("none (position)", (), (), Need.NOTHING)
HISTORY = Kind("history", ("history",), ("history",), Need.NOTHING)
TOKEN = Kind("q(x)", ("token_prob",), ("token_prob",), Need.DRAFT)
LARGEST = Kind("largest q", ("top_prob",), ("top_prob",), Need.DRAFT)
ENTROPY = Kind("entropy", ("entropy",), ("entropy",), Need.DRAFT)
CONFIDENCE = Kind("confidence head", ("confidence",), ("confidence",), Need.CONFIDENCE)
OVERLAP = Kind("S", ("overlap",), (), Need.COMPANION)
SCORES = Kind("S and A", ("overlap", "agreement"), (), Need.COMPANION)
ORACLE = Kind("oracle", ("acceptance",), ("acceptance",), Need.TARGET)
OWN, EVERY = "draft's own", "all"
_BEFORE_TOKEN = ", without x"


def _before(has_confidence: bool) -> tuple[str, ...]:
    return (*_BEFORE, "confidence") if has_confidence else _BEFORE


def _need(has_confidence: bool) -> Need:
    return Need.CONFIDENCE if has_confidence else Need.DRAFT


def own(has_confidence: bool) -> Kind:
    """All signals that need no companion."""
    columns = (*_before(has_confidence), "token_prob")
    return Kind(OWN, columns, columns, _need(has_confidence))


def every(has_confidence: bool) -> Kind:
    """All signals but the oracle."""
    free = own(has_confidence).columns
    return Kind(EVERY, (*free, "overlap", "agreement"), free, Need.COMPANION)


def without_companion(has_confidence: bool) -> Sequence[Kind]:
    """The sets of signals that need no companion."""
    head = [CONFIDENCE] if has_confidence else []
    before, need = _before(has_confidence), _need(has_confidence)
    own_before = Kind(OWN + _BEFORE_TOKEN, before, before, need)
    return [NONE, HISTORY, LARGEST, ENTROPY, TOKEN, *head, own_before, own(has_confidence)]


def with_companion(has_confidence: bool) -> Sequence[Kind]:
    """The sets of signals that need a companion."""
    before = _before(has_confidence)
    every_before = Kind(EVERY + _BEFORE_TOKEN, (*before, "overlap"), before, Need.COMPANION)
    return [OVERLAP, SCORES, every_before, every(has_confidence)]
