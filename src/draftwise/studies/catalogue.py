"""Registry of all studies by name, in the order of the report."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from draftwise.errors import InvalidParameterError
from draftwise.studies.acceptance_surface import AcceptanceSurface
from draftwise.studies.bias import Bias
from draftwise.studies.bounds import Bounds
from draftwise.studies.calibration import Calibration
from draftwise.studies.cost_ratio import CostRatio
from draftwise.studies.fairness import Fairness
from draftwise.studies.goodput import Goodput
from draftwise.studies.lenience import Lenience
from draftwise.studies.oracle_length import OracleLength
from draftwise.studies.rejection import Rejection
from draftwise.studies.signals.study import Signals
from draftwise.studies.speedup_by_context import SpeedupByContext
from draftwise.studies.study import Study
from draftwise.studies.verification_cost import VerificationCost

_ALL: tuple[type[Study], ...] = (
    OracleLength,
    Rejection,
    Bounds,
    SpeedupByContext,
    Signals,
    AcceptanceSurface,
    Goodput,
    CostRatio,
    VerificationCost,
    Fairness,
    Lenience,
    Bias,
    Calibration,
)
STUDIES: Mapping[str, type[Study]] = {study.name: study for study in _ALL}


def study_class(name: str) -> type[Study]:
    """Look up a study by name.

    Raises:
        InvalidParameterError: the name is unknown; suggests the closest name.
    """
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from: all, {', '.join(STUDIES)}"
        raise InvalidParameterError("name", f"unknown study {name!r}; {hint}")
    return STUDIES[name]
