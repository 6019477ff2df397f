"""The report of a benchmark as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from draftwise.benchmark.contenders import BASELINE
from draftwise.benchmark.plots import (
    acceptance_picture,
    goodput_picture,
    lengths_picture,
    time_picture,
)


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report.

    Args:
        path: of the page.
        report: as in ``results.json``.
    """
    environment = Environment(
        loader=PackageLoader("draftwise.benchmark", "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cells = report["cells"]
    page = environment.get_template("report.html").render(
        report=report,
        findings=findings(report),
        pictures={
            "Goodput": goodput_picture(cells),
            "Where the time of a step goes": time_picture(cells),
            "Acceptance by position": acceptance_picture(cells),
            "Verified lengths": lengths_picture(cells),
        },
        baseline=BASELINE,
    )
    path.write_text(page, encoding="utf-8")


def findings(report: Mapping[str, Any]) -> list[str]:
    """The report in a few sentences: who was best where, and by how much."""
    sentences = []
    for cell in report["cells"]:
        ratios = {
            name: figures["ratio"]["median"]
            for name, figures in cell["contenders"].items()
            if figures.get("ratio")
        }
        best = max(ratios, key=lambda name: ratios[name])
        where = f"{cell['workload']}, batch {cell['batch_size']}"
        if best == BASELINE:
            sentences.append(f"{where}: nothing was faster than the target alone.")
            continue
        sentence = f"{where}: {best} was fastest, {ratios[best]:.2f} times the target alone"
        slower = [name for name, ratio in ratios.items() if ratio < 0.97]
        if slower:
            sentence += f"; slower than the target alone: {', '.join(slower)}"
        sentences.append(f"{sentence}.")
    return sentences
