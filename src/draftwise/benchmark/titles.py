"""Names of the cells of a report, and whose results in them count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Name of target-only decoding among the contenders.
BASELINE = "none"


def series_of(cell: Mapping[str, Any]) -> str:
    """Name of the workload and temperature of a cell, which it shares with other batch sizes."""
    return f"{cell['workload']}, temperature {cell['temperature']:g}"


def title_of(cell: Mapping[str, Any]) -> str:
    """Name of a cell in tables and pages."""
    if "concurrency" in cell:
        load = f"{cell['concurrency']} at once"
    elif "request_rate" in cell:
        load = f"{cell['request_rate']:g} requests/s"
    else:
        load = f"batch {cell['batch_size']}"
    return f"{series_of(cell)}, {load}"


def is_complete(cell: Mapping[str, Any], contender: str) -> bool:
    """Whether a contender and target-only decoding have answered all prompts of a cell."""
    own, base = cell["contenders"][contender], cell["contenders"].get(BASELINE, {})
    return bool(own.get("ratio")) and not own.get("error") and not base.get("error")
