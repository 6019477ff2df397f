"""Interface of a study: measure, draw a figure, and compare the results with the source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from draftwise.errors import InvalidParameterError
from draftwise.studies.settings import StudySettings
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = Mapping[str, Any]

HOLDS, HOLDS_NOT, PARTLY = "holds", "does not hold", "holds in part"


def too_few_tokens(what: str) -> InvalidParameterError:
    """The error of a study whose texts have too few tokens.

    Args:
        what: what the tokens are too few for.
    """
    return InvalidParameterError(
        "max_tokens", f"too few for {what}; increase it, or use more prompts"
    )


@dataclass(frozen=True)
class Finding:
    """A claim of the source compared with the measurement.

    Attributes:
        source: the claim, paraphrased.
        ours: the measured result.
        verdict: whether the claim holds here.
    """

    source: str
    ours: str
    verdict: str

    @classmethod
    def of(cls, source: str, ours: str, holds: bool | Sequence[bool]) -> Finding:
        """Create a finding whose verdict follows from one or several conditions."""
        each = [holds] if isinstance(holds, bool) else list(holds)
        if all(each):
            return cls(source, ours, HOLDS)
        return cls(source, ours, PARTLY if any(each) else HOLDS_NOT)


@dataclass(frozen=True)
class Description:
    """The results of a study in words.

    Attributes:
        text: one paragraph.
        findings: the claims of the source compared with the measurements; empty without a source.
    """

    text: str
    findings: Sequence[Finding] = ()


class Study(ABC):
    """A recomputed table or figure.

    Measuring, drawing and describing are separate steps, so a figure can be redrawn from the data
    of an earlier run.

    Attributes:
        name: name on the command line.
        title: title in the report.
        source: publication of the original table or figure.
        timed: whether it measures times, which requires an otherwise idle machine.
        needs_companion: whether it requires a companion.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    timed: ClassVar[bool] = False
    needs_companion: ClassVar[bool] = False

    @classmethod
    def check_models(cls, settings: StudySettings) -> None:
        """Check that the settings name all required models, before any is loaded.

        Raises:
            InvalidParameterError: a required model is missing.
        """
        if cls.needs_companion and settings.companion is None:
            raise InvalidParameterError(
                "companion", f"missing: the study {cls.name} requires a companion model"
            )

    @abstractmethod
    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure and return the results as JSON-compatible values."""

    @abstractmethod
    def draw(self, data: Data) -> Figure:
        """Draw the results."""

    @abstractmethod
    def describe(self, data: Data) -> Description:
        """Describe the results in words and compare them with the source."""


SVIP = "Zhang et al. 2024, Draft Model Knows When to Stop (SVIP)"
SV = "Kim et al. 2025, Speculative Verification (SV)"
LAW = "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding"
OWN = "this project"
