"""A GGUF file: its keys, its tensors, and checks that it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.checkpoints.gguf.header import DamagedFileError, GgufHeader, TensorPlace
from draftwise.checkpoints.imports import quiet_import
from draftwise.checkpoints.lfs import refuse_lfs_pointer
from draftwise.checkpoints.quantization import BlockRows
from draftwise.errors import InvalidParameterError, UnsupportedModelError


class GgufFile:
    """A model in a GGUF file, or in several, which are mapped.

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
        """
        self.path = files[0]
        self._role = role
        headers = [_read_header(each, role) for each in files]
        self._header = headers[0]
        self._values: dict[str, Any] = {}
        self._tensors = {tensor.name: tensor for each in headers for tensor in each.tensors}
        self.tensors: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in self._tensors.items()
        }
        self._check_contents(sum(len(each.tensors) for each in headers))

    def _check_contents(self, count: int) -> None:
        """Refuse files of other things than models, and incomplete ones."""
        kind = self.value("general.type")
        if kind == "adapter":
            raise self.error(
                "is a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora, "
                "and use that file"
            )
        if kind == "mmproj" or self.value("general.architecture") == "clip":
            raise self.error("is an encoder of images for a model; use the file of the model")
        if count != len(self._tensors):
            raise self.error("and its other parts have a tensor twice")
        expected = self.value("split.tensors.count")
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
        return frozenset(self._header.keys)

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a string, a boolean, or a list of those.

        Args:
            key: its whole name.
            default: returned if the file has no such key.
        """
        if key not in self._values:
            try:
                self._values[key] = self._header.value(key)
            except DamagedFileError as error:
                raise self.error(str(error)) from error
        found = self._values[key]
        return default if found is None else found

    def read(self, name: str) -> Tensor:
        """The numbers of a tensor in float32.

        Raises:
            UnsupportedModelError: they are of a type that cannot be expanded.
            InvalidParameterError: the package that expands them is not installed.
        """
        tensor = self._tensors[name]
        numbers = torch.from_numpy(self._expanded(tensor))
        return numbers.reshape(tensor.shape)

    def _expanded(self, tensor: TensorPlace) -> NDArray[np.float32]:
        """``[rows, columns]`` the numbers of a tensor."""
        kind = tensor.kind.name
        if kind == "F32":
            return tensor.data.view(np.float32).copy()
        if kind == "F16":
            return tensor.data.view(np.float16).astype(np.float32)
        try:
            with quiet_import():
                from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise InvalidParameterError(
                self._role,
                f"{str(self.path)!r} needs another package: pip install 'draftwise[gguf]' "
                f"({error})",
            ) from error
        try:
            numbers = dequantize(tensor.data, GGMLQuantizationType[kind])
        except (KeyError, NotImplementedError) as error:
            raise self.error(
                f"has the tensor {tensor.name!r} in blocks of {kind}, which cannot be read"
            ) from error
        return np.array(numbers, dtype=np.float32, order="C")

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is stored in blocks of more than one number."""
        return self._tensors[name].kind.numbers > 1

    def rows(
        self,
        name: str,
        order: Tensor | None = None,
        scale: str | None = None,
        pieces: Tensor | None = None,
    ) -> BlockRows:
        """The rows of a tensor, as the file stores them.

        Args:
            name: the tensor.
            order: ``[rows]`` int64, which rows in which order; ``None`` for all.
            scale: name of a tensor of one number that multiplies them; ``None`` for none.
            pieces: ``[pieces]`` int64, the order of the equal pieces of each row; ``None`` for that
                of the file.
        """
        tensor, unit = self._tensors[name], 1.0 if scale is None else self.read(scale).item()
        kind = tensor.kind
        return BlockRows(kind.name, kind.number, tensor.data, tensor.shape[-1], order, unit, pieces)

    def error(self, what: str) -> UnsupportedModelError:
        """An error about this file: its name, and what is wrong with it."""
        return UnsupportedModelError(self._role, f"{str(self.path)!r} {what}")


def _read_header(path: Path, role: str) -> GgufHeader:
    refuse_lfs_pointer(path, role)
    try:
        return GgufHeader(path)
    except OSError as error:
        reason = error.strerror or error
        raise UnsupportedModelError(role, f"cannot read {str(path)!r}: {reason}") from error
    except DamagedFileError as error:
        raise UnsupportedModelError(role, f"{str(path)!r} {error}") from error
