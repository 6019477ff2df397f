"""The folder of a draft that is no ordinary model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from draftwise import zoo
from draftwise.errors import DraftwiseError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# What such a folder says in its configuration that it contains.
TYPE_KEY = "draftwise_model_type"


def find_draft(name: str, kind: str) -> Path | None:
    """The folder of a draft that is no ordinary model.

    Args:
        name: a folder or a zoo name, without a quantisation.
        kind: what it is, such as ``"exit"``.

    Returns:
        ``None`` if the name is that of something else.
    """
    folder = Path(name).expanduser()
    if name.startswith(zoo.PREFIX):
        try:
            folder = zoo.resolve(name)
        except DraftwiseError:  # the loader of models reports it
            return None
    if not (folder / CONFIG).is_file():
        return None
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the loader of models reports it
        return None
    is_one = isinstance(found, dict) and found.get(TYPE_KEY) == kind
    return folder if is_one else None


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
