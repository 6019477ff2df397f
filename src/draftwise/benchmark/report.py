"""Results as files that say where they come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# Where a result is written is no property of it.
_PLACES = ("output", "table")


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was run, from which revision, on what.

    Args:
        settings: of the command; of files only their names are kept.
    """
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "settings": {k: _portable(v) for k, v in settings.items() if k not in _PLACES},
        "revision": revision.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def write_report(path: Path, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Write figures and their provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = provenance(settings) | dict(figures)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _portable(value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, list):
        return " ".join(_portable(each) for each in value)
    return str(value)
