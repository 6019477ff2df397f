"""Fit a cost curve to measured passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from draftwise.core.stage_cost import StageCost
from draftwise.profiling.passes import PassShape, Stage


class Point(NamedTuple):
    """A measured pass.

    Attributes:
        stage: stage of the step.
        shape: shape of the pass.
        seconds: median time over the repetitions.
        num_passes: number of repetitions.
    """

    stage: Stage
    shape: PassShape
    seconds: float
    num_passes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the point as JSON-compatible values."""
        return {
            "stage": self.stage.value,
            **self.shape._asdict(),
            "seconds": self.seconds,
            "num_passes": self.num_passes,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        """The inverse of :meth:`to_dict`."""
        shape = PassShape(*(int(values[name]) for name in PassShape._fields))
        return cls(
            Stage(values["stage"]), shape, float(values["seconds"]), int(values["num_passes"])
        )


def fit_stage(points: Sequence[Point]) -> StageCost:
    """Fit a cost curve to the measured passes of one stage, by least squares of relative errors.

    Time is f(tokens) + a·(context summed over requests), with f non-decreasing and a ≥ 0. One
    least-squares problem over non-negative increments solves for f (isotonic regression) and a. If
    all passes of the stage had the same context, its cost is part of f and a is 0.

    Args:
        points: measured passes of one stage, at least one.
    """
    tokens = np.array([point.shape.num_tokens for point in points], dtype=float)
    context = np.array([point.shape.num_requests * point.shape.context for point in points])
    seconds = np.array([point.seconds for point in points])
    knots = np.unique(tokens)
    columns = (tokens[:, None] >= knots).astype(float)
    if len({point.shape.context for point in points}) > 1:
        columns = np.column_stack([columns, context])
    scale = columns.max(axis=0)
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones(len(points)))
    solution = solution / scale
    curve = np.cumsum(solution[: len(knots)])
    per_context_token = float(solution[len(knots)]) if len(solution) > len(knots) else 0.0
    return StageCost(
        tuple(float(knot) for knot in knots), tuple(float(s) for s in curve), per_context_token
    )
