"""Names of the tensors of a folder, read without the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

SAFE_FILES = "*.safetensors"
INDEX = "model.safetensors.index.json"


def tensor_names(folder: Path) -> Iterator[str]:
    """The names of the tensors in the safetensors files of a folder.

    They are read from the index if there is one. Files that cannot be read have none.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):
        yield from json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return
    for file in sorted(folder.glob(SAFE_FILES)):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()
