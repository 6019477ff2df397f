"""Figures of a benchmark report, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftwise.benchmark.style import COLOURS, HATCHES, STYLE, legend_below, look, pyplot, svg
from draftwise.benchmark.titles import BASELINE, series_of
from draftwise.core.types import PARTS

_MAX_COLUMNS = 3
plt = pyplot()

Cells = Sequence[Mapping[str, Any]]


def goodput_figure(cells: Cells) -> str:
    """Tokens per second relative to target-only decoding by batch size.

    There is one panel per workload and temperature. Panels of one workload share a row.
    """
    series = list(dict.fromkeys(series_of(cell) for cell in cells))
    temperatures = {cell["temperature"] for cell in cells}
    columns = len(temperatures) if len(temperatures) > 1 else min(len(series), _MAX_COLUMNS)
    rows = -(-len(series) // columns)
    names = _names(cells)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            rows,
            columns,
            figsize=(4.2 * columns, 3.1 * rows + 0.3),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, name in zip(panels.flat, series, strict=False):
            _goodput_panel(axes, [cell for cell in cells if series_of(cell) == name], names)
            axes.set_title(name)
        for axes in panels.flat[len(series) :]:
            axes.set_visible(False)
        for axes in panels[:, 0]:
            axes.set_ylabel("tokens per second, × target only")
        legend_below(figure, panels[0][0])
        return svg(figure)


def _goodput_panel(axes: Axes, cells: Cells, names: Sequence[str]) -> None:
    sizes = sorted({cell["batch_size"] for cell in cells})
    for number, name in enumerate(names):
        points = [
            (cell["batch_size"], cell["contenders"][name]["ratio"])
            for cell in cells
            if cell["contenders"].get(name, {}).get("ratio")
        ]
        if not points:
            continue
        points.sort()
        at = [sizes.index(size) for size, _ in points]
        middle = [ratio["median"] for _, ratio in points]
        below = [ratio["median"] - ratio["low"] for _, ratio in points]
        above = [ratio["high"] - ratio["median"] for _, ratio in points]
        axes.errorbar(at, middle, (below, above), label=name, capsize=2, **look(number))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("batch size, requests")


def time_figure(cells: Cells) -> str:
    """Time by part of a step: one bar per policy of Draftwise, one panel per batch size."""
    with plt.rc_context(STYLE):
        figure, panels = _panels(cells, height=3.4)
        for axes, own in panels:
            names = [name for name, figures in own.items() if "share_of_time" in figures]
            bottom = [0.0] * len(names)
            for number, part in enumerate(PARTS):
                milliseconds = [
                    1e3 * own[name]["share_of_time"][part] * own[name]["step_seconds"]
                    for name in names
                ]
                axes.bar(
                    range(len(names)),
                    milliseconds,
                    bottom=bottom,
                    label=part,
                    color=COLOURS[number],
                    edgecolor="white",
                    hatch=HATCHES[number],
                )
                bottom = [a + b for a, b in zip(bottom, milliseconds, strict=True)]
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
            axes.grid(axis="x", visible=False)
        panels[0][0].set_ylabel("milliseconds per step")
        legend_below(figure, panels[0][0])
        return svg(figure)


def acceptance_figure(cells: Cells) -> str:
    """Acceptance rate of the tested tokens by position in the draft."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
        for number, name in enumerate(_names(cells)):
            rows = [
                cell["contenders"][name]["acceptance_by_position"]
                for cell in cells
                if cell["contenders"].get(name, {}).get("acceptance_by_position")
            ]
            if not rows:
                continue
            length = max(map(len, rows))
            means = [
                sum(row[i] for row in rows if len(row) > i) / sum(len(row) > i for row in rows)
                for i in range(length)
            ]
            axes.plot(range(1, length + 1), means, label=name, **look(number))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("acceptance rate of tested tokens")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(figure, axes)
        return svg(figure)


def lengths_figure(cells: Cells) -> str:
    """Distribution of verified tokens per request and step, one panel per batch size."""
    with plt.rc_context(STYLE):
        figure, panels = _panels(cells, height=3.0, sharey=True)
        for axes, own in panels:
            for number, name in enumerate(_names(cells)):
                counts = own.get(name, {}).get("verified_lengths")
                if counts and name != BASELINE:
                    shares = [count / sum(counts) for count in counts]
                    axes.plot(range(len(shares)), shares, label=name, **look(number))
            axes.set_xlabel("verified tokens")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0][0].set_ylabel("fraction of request steps")
        legend_below(figure, panels[0][0])
        return svg(figure)


def _panels(
    cells: Cells, height: float, sharey: bool = False
) -> tuple[Figure, list[tuple[Axes, Mapping[str, Any]]]]:
    """A figure with one panel per batch size, and the contenders that each panel shows."""
    # Of several cells of a batch size, the first one is shown.
    by_size = {cell["batch_size"]: cell["contenders"] for cell in reversed(cells)}
    sizes = sorted(by_size)
    figure, panels = plt.subplots(
        1,
        len(sizes),
        figsize=(max(4.2, 2.6 * len(sizes)), height),
        sharey=sharey,
        squeeze=False,
        layout="constrained",
    )
    for axes, size in zip(panels[0], sizes, strict=True):
        axes.set_title(f"batch {size}")
    return figure, [(axes, by_size[size]) for axes, size in zip(panels[0], sizes, strict=True)]


def _names(cells: Cells) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))
