"""Names of the cells of a report, in tables and pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def series_of(cell: Mapping[str, Any]) -> str:
    """Name of the workload and temperature of a cell, which it shares with other batch sizes."""
    return f"{cell['workload']}, temperature {cell['temperature']:g}"


def title_of(cell: Mapping[str, Any]) -> str:
    """Name of a cell in tables and pages."""
    return f"{series_of(cell)}, batch {cell['batch_size']}"
