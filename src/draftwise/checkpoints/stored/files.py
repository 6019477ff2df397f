"""The safetensors files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointFiles:
    """The tensors of a checkpoint, which are read when they are asked for.

    Attributes:
        names: names of all tensors.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files that ``transformers`` would load.

        They are closed with the last reference to them. After an error, threads of
        ``transformers`` may still read them.

        Raises:
            OSError: the folder contains none, or one of them is missing.
        """
        self._files: dict[str, Any] = {}
        for path in _paths(folder):
            file: Any = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        self.names = frozenset(self._files)

    def read(self, name: str) -> Tensor:
        """A tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def part(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        return self._files[name].get_slice(name)

    def type_name(self, name: str) -> str:
        """A tensor's type by its name in the format, such as ``"F8_E4M3"``."""
        return str(self.part(name).get_dtype())


def _paths(folder: Path) -> list[Path]:
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(f"{str(folder)!r} has neither {_WHOLE} nor {_INDEX}")
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} has no {path.name}, which its index names")
    return paths
