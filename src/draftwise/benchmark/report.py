"""Result files with their provenance."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import draftwise
from draftwise.kernels.native.library import native_library

# Settings that only name output files.
_PLACES = ("output", "table")


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
    """Write figures and their provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = provenance(settings) | dict(figures)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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
    if isinstance(value, list):
        return " ".join(_portable(each) for each in value)
    return str(value)
