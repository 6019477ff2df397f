"""Pointers of Git LFS, which are in a folder in place of its large files until they are fetched."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from draftwise.checkpoints.tensor_names import INDEX, SAFE_FILES
from draftwise.errors import ModelNotFoundError

# First line of every pointer, according to the specification of Git LFS.
_FIRST_LINE = b"version https://git-lfs.github.com/spec/v1"
_PICKLED = ("*.bin", "*.pt")
# What is read beside the weights: configurations, tokenizers and chat templates.
_OTHERS = ("*.json", "*.model", "*.jinja", "*.txt")


def refuse_lfs_pointer(path: Path, role: str) -> None:
    """Refuse a file that is a pointer of Git LFS. A file that cannot be read is none.

    Args:
        path: the file.
        role: the role of its model; named in the error.

    Raises:
        ModelNotFoundError: it is a pointer. The error names the file and the remedy.
    """
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_FIRST_LINE)) == _FIRST_LINE:
            raise ModelNotFoundError(
                role,
                f"{str(path)!r} is a pointer of Git LFS instead of the file itself; run "
                "'git lfs pull' in its folder",
            )


def refuse_lfs_pointers(folder: Path, role: str) -> None:
    """Refuse a model's folder in which a file that is read is a pointer of Git LFS.

    Other files may be pointers, such as weights in a second format.

    Args:
        folder: the folder of a model or of a draft.
        role: its role; named in the error.

    Raises:
        ModelNotFoundError: a file is a pointer. The error names the first one.
    """
    others = sorted(file for pattern in _OTHERS for file in folder.glob(pattern))
    for file in (*others, *_weights(folder)):
        refuse_lfs_pointer(file, role)


def _weights(folder: Path) -> list[Path]:
    """The files of the weights. Those that are not safetensors are read if there are no others."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    safe = sorted(folder.glob(SAFE_FILES))
    return safe or sorted(file for pattern in _PICKLED for file in folder.glob(pattern))
