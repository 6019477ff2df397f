"""Common style of all figures, with colours and markers for readers with colour blindness."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, each with a marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A6D00")
MARKERS = "osD^vPX*"
HATCHES = ("", "//", "..", "", "xx", "", "\\\\", "++")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    # Makes the SVG output deterministic.
    "svg.hashsalt": "draftwise",
}


def pyplot() -> Any:
    """``matplotlib.pyplot``, which draws without a window.

    It is imported here, as what has figures can also be listed without an installed matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def look(number: int) -> dict[str, Any]:
    """Colour, marker and line style of the series with this index."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ("-", "--", ":")[number // len(COLOURS) % 3],
        "markersize": 4.5,
        "linewidth": 1.3,
    }


def legend_below(figure: Figure, axes: Axes, columns: int = 6) -> None:
    """Add one legend below all panels, with the entries of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        number = min(len(labels), columns)
        figure.legend(handles, labels, loc="outside lower center", ncols=number, frameon=False)


def svg(figure: Figure) -> str:
    """Convert a figure to SVG text for embedding in a page, and close it."""
    text = io.StringIO()
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
