"""Result files with their provenance."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import draftwise
from draftwise.benchmark.turns import spread
from draftwise.kernels.native.library import native_library

# Settings that only name output files.
_PLACES = ("output", "table")
# Entries of a cell that its inner cells share.
_LABELS = (
    *("workload", "temperature", "batch_size", "concurrency", "request_rate"),
    *("target", "draft", "companion"),
)
# Most numbers of a mapping that is no cell of its own.
_MOST_PARTS = 6


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, revision, machine and versions of a run.

    Args:
        settings: settings of the command. Paths are reduced to file names.
    """
    return {
        "settings": {k: _portable(v) for k, v in settings.items() if k not in _PLACES},
        "revision": _revision(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "kernels": _kernels(),
        "versions": {
            "draftwise": draftwise.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def write_report(path: Path, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Write figures and their provenance as JSON, and beside them their summary.

    The summary has the suffix ``.jsonl``; see :func:`summary_lines`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance(settings)
    path.write_text(json.dumps(origin | dict(figures), indent=2) + "\n", encoding="utf-8")
    lines = "\n".join(summary_lines(path.stem, origin, figures))
    path.with_suffix(".jsonl").write_text(lines + "\n", encoding="utf-8")


def summary_lines(run: str, origin: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[str]:
    """A line of JSON on a run, and one for each mapping of its figures that has numbers.

    Numbers have six significant digits. A list of numbers is replaced by its median and quartiles.
    A mapping of a few numbers, such as a spread, is a part of the line of its cell.

    Args:
        run: name of the run, which all lines have.
        origin: settings, revision and machine; see :func:`provenance`.
        figures: figures of the run, as JSON-compatible values.
    """
    yield json.dumps({"run": run, **origin}, ensure_ascii=False)
    for row in _rows(figures, (), {}):
        yield json.dumps({"run": run, **row}, ensure_ascii=False)


def _rows(
    figures: Mapping[str, Any], cell: tuple[str, ...], labels: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    labels = {**labels, **{name: figures[name] for name in _LABELS if name in figures}}
    row, inner = {}, []
    for name, value in figures.items():
        if name in _LABELS:
            continue
        if isinstance(value, Mapping) and _is_part_of_its_cell(value):
            row[name] = {each: _short(number) for each, number in value.items()}
        elif isinstance(value, Mapping):
            inner.append((name, value))
        elif not isinstance(value, list | tuple):
            row[name] = _short(value)
        elif value and all(isinstance(each, int | float) for each in value):
            row[name] = {each: _short(number) for each, number in spread(value).items()}
        else:
            inner += [(name, each) for each in value if isinstance(each, Mapping)]
    if any(not isinstance(value, str) for value in row.values()):
        yield {"cell": "/".join(cell), **labels, **row}
    for name, value in inner:
        yield from _rows(value, (*cell, name), labels)


def _is_part_of_its_cell(figures: Mapping[str, Any]) -> bool:
    """Whether a mapping is a spread or the like, and no cell of its own."""
    numbers = all(isinstance(value, int | float) for value in figures.values())
    return 0 < len(figures) <= _MOST_PARTS and numbers


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _revision() -> str:
    """Git revision of the running checkout; empty without a checkout or without git."""
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(draftwise.__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _kernels() -> str:
    """Kernels that multiply bfloat16 weights on the CPU."""
    library = native_library()
    if library is None:
        return "PyTorch"
    if library.multiplies_tiles:
        return "native, matrix unit"
    return "native, pairs" if library.multiplies_pairs else "native, float32"


def _portable(value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, list | tuple):
        return " ".join(_portable(each) for each in value)
    return str(value)
