"""The pictures of a benchmark's report, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftwise.benchmark.contenders import BASELINE
from draftwise.benchmark.recorder import PARTS

matplotlib.use("Agg")

Cells = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, told apart without colour vision too, with a marker for each.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A6D00")
_MARKERS = "osD^vPX*"
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
}


def goodput_picture(cells: Cells) -> str:
    """Tokens per second against target-only decoding over the batch size, a panel per workload."""
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(
            1,
            len(workloads),
            figsize=(4.2 * len(workloads), 3.4),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, workload in zip(panels[0], workloads, strict=True):
            own = [cell for cell in cells if cell["workload"] == workload]
            _goodput_panel(axes, own)
            axes.set_title(workload)
        panels[0][0].set_ylabel("tokens per second, × target-only")
        _legend_below(figure, panels[0][0])
        return _svg(figure)


def _goodput_panel(axes: Axes, cells: Cells) -> None:
    sizes = sorted({cell["batch_size"] for cell in cells})
    for number, name in enumerate(_names(cells)):
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
        axes.errorbar(at, middle, (below, above), label=name, capsize=2, **_look(number))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("batch size, requests")


def time_picture(cells: Cells) -> str:
    """Where the time of a step goes: a bar for each of our policies, a panel per batch size."""
    sizes = sorted({cell["batch_size"] for cell in cells})
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(
            1,
            len(sizes),
            figsize=(max(4.2, 2.6 * len(sizes)), 3.4),
            squeeze=False,
            layout="constrained",
        )
        for axes, size in zip(panels[0], sizes, strict=True):
            own = next(cell for cell in cells if cell["batch_size"] == size)["contenders"]
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
                    color=_COLOURS[number],
                    edgecolor="white",
                    hatch=("", "//", "..", "", "xx", "")[number],
                )
                bottom = [a + b for a, b in zip(bottom, milliseconds, strict=True)]
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
            axes.set_title(f"batch {size}")
            axes.grid(axis="x", visible=False)
        panels[0][0].set_ylabel("milliseconds per step")
        _legend_below(figure, panels[0][0])
        return _svg(figure)


def acceptance_picture(cells: Cells) -> str:
    """Share of verified tokens that were accepted, by position in the draft."""
    with plt.rc_context(_STYLE):
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
            axes.plot(range(1, length + 1), means, label=name, **_look(number))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted, of those reached")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend_below(figure, axes)
        return _svg(figure)


def lengths_picture(cells: Cells) -> str:
    """How many tokens were verified per request and step: a panel per batch size."""
    sizes = sorted({cell["batch_size"] for cell in cells})
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(
            1,
            len(sizes),
            figsize=(max(4.2, 2.6 * len(sizes)), 3.0),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, size in zip(panels[0], sizes, strict=True):
            own = next(cell for cell in cells if cell["batch_size"] == size)["contenders"]
            for number, name in enumerate(_names(cells)):
                counts = own.get(name, {}).get("verified_lengths")
                if counts and name != BASELINE:
                    shares = [count / sum(counts) for count in counts]
                    axes.plot(range(len(shares)), shares, label=name, **_look(number))
            axes.set_title(f"batch {size}")
            axes.set_xlabel("tokens verified")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0][0].set_ylabel("share of requests' steps")
        _legend_below(figure, panels[0][0])
        return _svg(figure)


def _names(cells: Cells) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))


def _look(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": ("-", "--", ":")[number // len(_COLOURS) % 3],
        "markersize": 4.5,
        "linewidth": 1.3,
    }


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(labels), 6)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
