"""What a study is: measure, draw, say what was seen and what the source had found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from matplotlib.figure import Figure

from draftwise.errors import InvalidParameterError
from draftwise.studies.settings import StudySettings
from draftwise.studies.workbench import Workbench

Data = Mapping[str, Any]

HOLDS, HOLDS_NOT, PARTLY = "holds", "does not hold", "holds in part"


@dataclass(frozen=True)
class Finding:
    """One statement of the source beside what was measured here.

    Attributes:
        source: what the source says, in our words.
        ours: what was measured.
        verdict: whether it holds here.
    """

    source: str
    ours: str
    verdict: str

    @classmethod
    def of(cls, source: str, ours: str, holds: bool | Sequence[bool]) -> Finding:
        """With the verdict from one condition, or from several of which some may hold."""
        each = [holds] if isinstance(holds, bool) else list(holds)
        if all(each):
            return cls(source, ours, HOLDS)
        return cls(source, ours, PARTLY if any(each) else HOLDS_NOT)


@dataclass(frozen=True)
class Account:
    """What a study says in words.

    Attributes:
        text: a paragraph.
        findings: the source's statements beside ours; empty where there is no source.
    """

    text: str
    findings: Sequence[Finding] = ()


class Study(ABC):
    """One table or figure, recomputed.

    The three steps are apart: a picture can be drawn anew from the data of an earlier run.

    Attributes:
        name: what users call it.
        title: as it is shown.
        source: whose table or figure it is.
        timed: whether it takes times, so that the machine should do nothing else.
        needs_companion: whether it cannot do without a companion.
        fewest_models: how many small models it compares at least.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    timed: ClassVar[bool] = False
    needs_companion: ClassVar[bool] = False
    fewest_models: ClassVar[int] = 0

    @classmethod
    def check_models(cls, settings: StudySettings) -> None:
        """Check that all models are named that it needs, before any is loaded.

        Raises:
            InvalidParameterError: one is missing.
        """
        if cls.needs_companion and settings.companion is None:
            raise InvalidParameterError(
                "companion", f"missing: {cls.name} is about what a companion knows; name one"
            )
        names = set(settings.models) - {settings.target}
        if len(names) < cls.fewest_models:
            raise InvalidParameterError(
                "models",
                f"{cls.name} compares {cls.fewest_models} small models or more, got {len(names)}; "
                "name them, separated by commas",
            )

    @abstractmethod
    def measure(self, bench: Workbench) -> dict[str, Any]:
        """All figures, as plain values that go into a JSON file."""

    @abstractmethod
    def draw(self, data: Data) -> Figure:
        """The picture of what was measured."""

    @abstractmethod
    def tell(self, data: Data) -> Account:
        """What was seen, in words."""


SVIP = "Zhang et al. 2024, Draft Model Knows When to Stop (SVIP)"
SV = "Kim et al. 2025, Speculative Verification (SV)"
LAW = "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding"
OWN = "this project"
