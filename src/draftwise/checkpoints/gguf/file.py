"""A GGUF file: its keys, its tensors, and checks that it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.checkpoints.gguf.blocks import matrix_of_blocks
from draftwise.checkpoints.imports import quiet_import
from draftwise.checkpoints.lfs import refuse_lfs_pointer
from draftwise.checkpoints.quantization import QuantizedMatrix
from draftwise.errors import InvalidParameterError, UnsupportedModelError

_MAGIC = b"GGUF"
# The version follows the magic. Its low half is zero in files of the other byte order.
_VERSION_BYTES = 4


class GgufFile:
    """A model in a GGUF file, or in several, whose headers were read once.

    Reading the header of a file with a vocabulary of 262,144 tokens takes seconds.

    Attributes:
        path: the file, or the first of several.
        tensors: shape ``[rows, columns]`` of each tensor, by name.
    """

    def __init__(self, files: Sequence[Path], role: str) -> None:
        """Read the header, and check that the file is complete.

        Args:
            files: the file, or all parts of a model in several files, in order.
            role: the model's role; named in errors.

        Raises:
            UnsupportedModelError: a file is not a GGUF file, it is truncated, its numbers are
                stored in big-endian order, or it contains something else than a model.
            ModelNotFoundError: a file is a pointer of Git LFS.
            InvalidParameterError: the packages that read GGUF files are not installed.
        """
        self.path = files[0]
        self._role = role
        readers = [_read(each, role) for each in files]
        self._reader = readers[0]
        for reader in readers[1:]:
            self._reader.tensors.extend(reader.tensors)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.tensors: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self._check_contents()

    def _check_contents(self) -> None:
        """Refuse files of other things than models, and incomplete ones."""
        kind = self.value("general.type")
        if kind == "adapter":
            raise self.error(
                "is a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora, "
                "and use that file"
            )
        if kind == "mmproj" or self.value("general.architecture") == "clip":
            raise self.error("is an encoder of images for a model; use the file of the model")
        count, expected = len(self._reader.tensors), self.value("split.tensors.count")
        if expected is not None and int(expected) != count:
            raise self.error(f"and its other parts have {count} of {int(expected)} tensors")
        is_bpe = self.value("tokenizer.ggml.model") == "gpt2"
        merges, tokens = "tokenizer.ggml.merges", "tokenizer.ggml.tokens"
        if is_bpe and tokens in self.keys and merges not in self.keys:
            raise self.error(f"has no {merges}, which its tokenizer needs; convert the model again")

    @property
    def architecture(self) -> str:
        """The architecture that the file names.

        Raises:
            UnsupportedModelError: it names none.
        """
        found = self.value("general.architecture")
        if not isinstance(found, str):
            raise self.error("has no key 'general.architecture'")
        return found

    @property
    def keys(self) -> frozenset[str]:
        """Names of the metadata."""
        return frozenset(self._reader.fields)

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a string, a boolean, or a list of those.

        Args:
            key: its whole name.
            default: returned if the file has no such key.
        """
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise self.error(f"is damaged: {key!r} is not UTF-8") from error

    def read(self, name: str) -> Tensor:
        """The numbers of a tensor in float32.

        Raises:
            UnsupportedModelError: they are of a type that cannot be expanded.
        """
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            numbers = dequantize(np.asarray(tensor.data), tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise self.error(
                f"has the tensor {name!r} in blocks of {kind}, which cannot be read"
            ) from error
        copied = np.array(numbers, dtype=np.float32, order="C")
        return torch.from_numpy(copied).reshape(self.tensors[name])

    def blocks(self, parts: Sequence[tuple[str, Tensor | None]]) -> QuantizedMatrix | None:
        """The integers and scales of a matrix's blocks.

        Args:
            parts: the tensors whose rows it consists of, each with the rows ``[rows]`` int64 that
                are taken, or ``None`` for all.

        Returns:
            ``None`` if the tensors have no integers, or differ in the type of their blocks.
        """
        tensors = [self._tensors[name] for name, _ in parts]
        kinds = {tensor.tensor_type.name for tensor in tensors}
        if len(kinds) != 1:
            return None
        rows = [
            np.asarray(tensor.data) if which is None else np.asarray(tensor.data)[which.numpy()]
            for tensor, (_, which) in zip(tensors, parts, strict=True)
        ]
        return matrix_of_blocks(kinds.pop(), rows[0] if len(rows) == 1 else np.concatenate(rows))

    def error(self, what: str) -> UnsupportedModelError:
        """An error about this file: its name, and what is wrong with it."""
        return UnsupportedModelError(self._role, f"{str(self.path)!r} {what}")


def _read(path: Path, role: str) -> Any:
    """The header of a file."""
    refuse_lfs_pointer(path, role)
    name = str(path)
    try:
        with path.open("rb") as file:
            magic, version = file.read(len(_MAGIC)), file.read(_VERSION_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise UnsupportedModelError(role, f"cannot read {name!r}: {reason}") from error
    if magic != _MAGIC:
        raise UnsupportedModelError(role, f"{name!r} is not a GGUF file")
    if len(version) == _VERSION_BYTES and version[:2] == b"\0\0":
        raise UnsupportedModelError(
            role, f"{name!r} is in big-endian order; convert it to little-endian"
        )
    try:
        return _read_header(path)
    except ImportError as error:
        raise InvalidParameterError(
            role, f"{name!r} needs another package: pip install 'draftwise[gguf]' ({error})"
        ) from error
    except Exception as error:  # a broken file can make the library raise anything
        raise UnsupportedModelError(
            role, f"{name!r} is truncated or damaged: {_first_line(error)}"
        ) from error


def _read_header(path: Path) -> Any:
    with quiet_import():
        from gguf import GGUFReader
    return GGUFReader(str(path))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
