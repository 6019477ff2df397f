"""Writes the folder of a draft that is no ordinary model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``; each file is replaced atomically."""
    temporary = folder / f"{WEIGHTS}.tmp"
    save_file(dict(tensors), temporary, {"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing it atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
