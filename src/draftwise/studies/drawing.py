"""Figures and panels in the common style."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from draftwise.benchmark.style import COLOURS, STYLE, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Draw = Callable[[Any, Mapping[str, Any]], "Figure"]


def styled(draw: Draw) -> Draw:
    """Decorator that applies the common style to a study's ``draw``."""

    @wraps(draw)
    def drawn(study: Any, data: Mapping[str, Any]) -> Figure:
        with pyplot().rc_context(STYLE):
            return draw(study, data)

    return cast(Draw, drawn)


def panels(
    columns: int = 1, rows: int = 1, width: float = 4.2, height: float = 3.2, **named: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a grid of panels, returned in row-major order.

    Args:
        columns, rows: numbers of columns and rows.
        width, height: size of each panel, in inches.
        named: further arguments of ``matplotlib.pyplot.subplots``.
    """
    figure, axes = pyplot().subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
        **named,
    )
    return figure, [each for row in axes for each in row]


def count_on(axis: Axis) -> None:
    """Let an axis have whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def heat_map(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    across: Sequence[str],
    down: Sequence[str],
    label: str,
    digits: int = 2,
    limits: tuple[float, float] | None = None,
) -> None:
    """Draw a heat map with the value in each cell, in a perceptually uniform colour map (cividis).

    Args:
        axes: axes to draw on.
        values: ``[down][across]``; ``None`` leaves a cell empty.
        across: names of the columns.
        down: names of the rows.
        label: title: quantity and unit.
        digits: number of decimals.
        limits: limits of the colour scale; ``None`` for the range of the values.
    """
    cells = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    low, high = limits or (float(np.nanmin(cells)), float(np.nanmax(cells)))
    axes.imshow(cells, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    axes.set_xticks(range(len(across)), across)
    if max(map(len, across)) > 6:
        pyplot().setp(axes.get_xticklabels(), rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(down)), down)
    axes.grid(visible=False)
    axes.set_title(label)
    middle = (low + high) / 2
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            if np.isfinite(value):
                colour = "black" if value > middle else "white"
                text = f"{value:.{digits}f}"
                axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)


def bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    digits: int = 2,
) -> None:
    """Draw horizontal bars labelled with their values, the first on top."""
    at = np.arange(len(names))
    axes.barh(at, values, color=COLOURS[0], height=0.7)
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for i, value in enumerate(values):
        axes.annotate(
            f"{value:.{digits}f}",
            (value, i),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.margins(x=0.12)
