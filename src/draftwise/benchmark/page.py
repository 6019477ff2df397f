"""The report of a benchmark as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from draftwise.benchmark.figures import NGRAM_TOKENS
from draftwise.benchmark.plots import (
    acceptance_figure,
    goodput_figure,
    lengths_figure,
    time_figure,
)
from draftwise.benchmark.titles import BASELINE, is_complete, series_of, title_of


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report.

    Args:
        path: path of the page.
        report: content of ``results.json``.
    """
    environment = Environment(
        loader=PackageLoader("draftwise.benchmark", "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cells = report["cells"]
    first = [cell for cell in cells if series_of(cell) == series_of(cells[0])]
    page = environment.get_template("report.html").render(
        report=report,
        title_of=title_of,
        temperatures=list(dict.fromkeys(cell["temperature"] for cell in cells)),
        summary=summary(cells),
        loads=list(dict.fromkeys(load_of(cell) for cell in cells)),
        num_workloads=len({cell["workload"] for cell in cells}),
        findings=findings(report),
        plots={
            "Goodput": goodput_figure(cells),
            f"Time by part of a step: {series_of(cells[0])}": time_figure(first),
            f"Acceptance by position: {series_of(cells[0])}": acceptance_figure(first),
            f"Verified lengths: {series_of(cells[0])}": lengths_figure(first),
        },
        baseline=BASELINE,
        ngram_tokens=NGRAM_TOKENS,
    )
    path.write_text(page, encoding="utf-8")


@dataclass(frozen=True)
class Average:
    """Speed of a contender relative to target-only decoding, over the workloads of a load.

    Attributes:
        mean: geometric mean of the medians.
        lowest: lowest median.
        num_workloads: number of workloads that the contender completed.
        is_best: whether no other contender that completed all workloads has a higher mean.
    """

    mean: float
    lowest: float
    num_workloads: int
    is_best: bool = False


def load_of(cell: Mapping[str, Any]) -> str:
    """Temperature and batch size of a cell."""
    return f"T {cell['temperature']:g}, batch {cell['batch_size']}"


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Average]]:
    """Averages over workloads, by contender and by load, which is a temperature and batch size."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        load = load_of(cell)
        for name, figures in cell["contenders"].items():
            if is_complete(cell, name):
                by_load = found.setdefault(name, {})
                by_load.setdefault(load, []).append(figures["ratio"]["median"])
    averages = {
        name: {
            load: Average(geometric_mean(ratios), min(ratios), len(ratios))
            for load, ratios in by_load.items()
        }
        for name, by_load in found.items()
    }
    for load in {load for by_load in averages.values() for load in by_load}:
        most = max(own[load].num_workloads for own in averages.values() if load in own)
        means = {
            name: own[load].mean
            for name, own in averages.items()
            if load in own and own[load].num_workloads == most
        }
        best = max(means, key=lambda name: means[name])
        averages[best][load] = replace(averages[best][load], is_best=True)
    return averages


def findings(report: Mapping[str, Any]) -> list[str]:
    """Summary sentences: the fastest contender of each cell, and its speed-up."""
    sentences = []
    for cell in report["cells"]:
        ratios = {
            name: figures["ratio"]["median"]
            for name, figures in cell["contenders"].items()
            if is_complete(cell, name)
        }
        if not ratios:
            sentences.append(f"{title_of(cell)}: no contender completed all rounds.")
            continue
        best = max(ratios, key=lambda name: ratios[name])
        where = title_of(cell)
        if best == BASELINE:
            sentences.append(f"{where}: no policy was faster than target-only decoding.")
            continue
        sentence = f"{where}: {best} was fastest, {ratios[best]:.2f} times target-only decoding"
        slower = [name for name, ratio in ratios.items() if ratio < 0.97]
        if slower:
            sentence += f"; slower than target-only decoding: {', '.join(slower)}"
        sentences.append(f"{sentence}.")
    return sentences
