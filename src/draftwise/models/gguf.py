"""GGUF files: checks before a model is loaded from one, and its blocks as integers with scales.

``transformers`` reads the configuration, the tokenizer and the weights, which it expands. The
native kernels compute with the integers and scales of the file's blocks, which are read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwise.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from draftwise.models.imports import quiet_import
from draftwise.models.quantization import QuantizedMatrix, keep_quantized

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
# Names of a linear layer's weight in a file, by the last part of the module's name.
_TENSORS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_LAYER = re.compile(r"layers\.(\d+)\.\w+\.(\w+)$")
# Relative difference between a block and the loaded weight, which may be rounded to bfloat16.
_ROUNDING = 2**-7
_NUM_COMPARED = 100  # outputs of a matrix that are compared
_END_TOKENS = ("eos", "eot", "eom")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return name.endswith(SUFFIX)


class GgufFile:
    """A GGUF file whose header was read once.

    Reading the header of a file with a vocabulary of 262,144 tokens takes seconds.

    Attributes:
        path: the file.
    """

    def __init__(self, name: str, role: str) -> None:
        """Read the header, and check that the file is complete.

        Args:
            name: path of the file.
            role: the model's role; named in errors.

        Raises:
            ModelNotFoundError: there is no such file.
            UnsupportedModelError: the file is not a GGUF file, or it is truncated.
            InvalidParameterError: the packages that read GGUF files are not installed.
        """
        self.path = Path(name).expanduser()
        self._role = role
        if not self.path.is_file():
            raise ModelNotFoundError(role, f"there is no file {name!r}")
        try:
            with self.path.open("rb") as file:
                is_gguf = file.read(len(_MAGIC)) == _MAGIC
        except OSError as error:
            reason = error.strerror or error
            raise UnsupportedModelError(role, f"cannot read {name!r}: {reason}") from error
        if not is_gguf:
            raise UnsupportedModelError(role, f"{name!r} is not a GGUF file")
        try:
            self._reader = _read_header(self.path)
        except ImportError as error:
            raise InvalidParameterError(
                role, f"{name!r} needs two packages: pip install 'draftwise[gguf]' ({error})"
            ) from error
        except Exception as error:  # a broken file can make the library raise anything
            raise UnsupportedModelError(
                role, f"{name!r} is truncated or damaged: {_first_line(error)}"
            ) from error

    @contextmanager
    def read_by_transformers(self) -> Iterator[None]:
        """Within the context, ``transformers`` reads this file with the header already read.

        It would read the header for the configuration, the weights and the tokenizer. Other threads
        must not load GGUF files meanwhile.
        """
        import gguf
        from transformers import modeling_gguf_pytorch_utils as loader

        original, progress_bar = gguf.GGUFReader, loader.tqdm

        def reader(path: Any, *others: Any) -> Any:
            same = Path(path).resolve() == self.path.resolve()
            return self._reader if same else original(path, *others)

        gguf.GGUFReader, loader.tqdm = reader, partial(progress_bar, disable=True)
        try:
            yield
        finally:
            gguf.GGUFReader, loader.tqdm = original, progress_bar

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text or a turn."""
        fields = (self._reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS)
        return frozenset(int(field.contents()) for field in fields if field is not None)

    def load_error(self, error: Exception) -> UnsupportedModelError:
        """The error for a complete file that ``transformers`` cannot load."""
        field = self._reader.get_field("general.architecture")
        architecture = "unknown" if field is None else str(field.contents())
        return UnsupportedModelError(
            self._role,
            f"{str(self.path)!r} has the architecture {architecture!r}, which transformers cannot "
            f"load from GGUF: {_first_line(error)}",
        )

    def keep_blocks(self, model: nn.Module) -> None:
        """Keep the integers and scales of the blocks of a model's linear layers.

        They are kept for :func:`draftwise.models.quantization.quantized_matrix`. A layer keeps
        nothing if its tensor is not stored in blocks of a known type.

        Args:
            model: a model that was loaded from this file, with expanded weights.
        """
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        config: Any = model.config
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for name, module in model.named_modules():
            tensor = tensors.get(_tensor_name(name, tensors))
            if tensor is None or not isinstance(module, nn.Linear):
                continue
            matrix = _matrix(tensor.tensor_type.name, np.asarray(tensor.data))
            if matrix is None or matrix.numbers.shape != module.weight.shape:
                continue
            num_heads = getattr(config, heads.get(name.rpartition(".")[2], ""), None)
            for candidate in (matrix, *([_in_halves(matrix, num_heads)] if num_heads else [])):
                if _equals(candidate, module.weight):
                    keep_quantized(module, candidate)
                    break


def _read_header(path: Path) -> Any:
    with quiet_import():
        import accelerate  # noqa: F401  # required by transformers
        from gguf import GGUFReader
    return GGUFReader(str(path))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _tensor_name(module: str, tensors: Mapping[str, object]) -> str:
    """The tensor of a linear layer's weight; empty if it is not known."""
    if module.endswith("lm_head"):
        return "output.weight" if "output.weight" in tensors else "token_embd.weight"
    found = _LAYER.search(module)
    if found is None or found[2] not in _TENSORS:
        return ""
    return f"blk.{found[1]}.{_TENSORS[found[2]]}.weight"


def _in_halves(matrix: QuantizedMatrix, num_heads: int) -> QuantizedMatrix:
    """Reorder the outputs of a query or key projection as ``transformers`` expects them.

    Files of Llamas store the two numbers that are rotated together next to each other,
    ``transformers`` half a head apart.
    """

    def reordered(rows: Tensor) -> Tensor:
        pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    minimums = None if matrix.minimums is None else reordered(matrix.minimums)
    return QuantizedMatrix(
        reordered(matrix.numbers), reordered(matrix.scales), minimums, matrix.bits, matrix.smallest
    )


def _equals(matrix: QuantizedMatrix, weight: Tensor) -> bool:
    """Whether a matrix equals a loaded weight up to rounding, on a sample of the outputs."""
    rows = torch.arange(0, len(weight), max(1, len(weight) // _NUM_COMPARED))
    minimums = None if matrix.minimums is None else matrix.minimums[rows]
    sample = replace(
        matrix, numbers=matrix.numbers[rows], scales=matrix.scales[rows], minimums=minimums
    )
    expected = weight.detach()[rows].float()
    largest = expected.abs().max().item()
    return torch.allclose(sample.dequantize(), expected, _ROUNDING, _ROUNDING**2 * largest)


def _matrix(kind: str, rows: Bytes) -> QuantizedMatrix | None:
    """The integers and scales of a tensor's blocks.

    Args:
        kind: name of the block type.
        rows: ``[rows, bytes]`` the blocks of each row.

    Returns:
        ``None`` for types without integers, and for unknown ones.
    """
    known = _BLOCKS.get(kind)
    if known is None or rows.ndim != 2:
        return None
    num_bytes, read = known
    blocks = np.ascontiguousarray(rows).reshape(-1, num_bytes)
    numbers, scales, minimums, bits, smallest = read(blocks)
    count = len(rows)
    return QuantizedMatrix(
        torch.from_numpy(numbers.astype(np.int8).reshape(count, -1)),
        torch.from_numpy(scales.astype(np.float32).reshape(count, -1)),
        None
        if minimums is None
        else torch.from_numpy(minimums.astype(np.float32).reshape(count, -1)),
        bits,
        smallest,
    )


# What a block contains: numbers, scales, minimums, bits of a number, and the smallest number.
_Contents = tuple[NDArray[Any], Floats, Floats | None, int, int]


def _half(blocks: Bytes, at: int) -> Floats:
    """``[blocks, 1]`` the float16 number at a byte of each block."""
    number: Floats = (
        np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
    )
    return number


def _nibbles(packed: Bytes) -> Bytes:
    """``[..., 2, n]`` low and high halves of bytes ``[..., n]``."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """``[blocks, 32]`` the fifth bit of each number."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")


def _q4_0(blocks: Bytes) -> _Contents:
    codes = _nibbles(blocks[:, 2:]).reshape(len(blocks), 32)
    return codes.astype(np.int8) - 8, _half(blocks, 0), None, 4, -8


def _q4_1(blocks: Bytes) -> _Contents:
    codes = _nibbles(blocks[:, 4:]).reshape(len(blocks), 32)
    return codes, _half(blocks, 0), -_half(blocks, 2), 4, 0


def _q5_0(blocks: Bytes) -> _Contents:
    low = _nibbles(blocks[:, 6:]).reshape(len(blocks), 32)
    codes = low | _fifth_bits(blocks, 2) << 4
    return codes.astype(np.int8) - 16, _half(blocks, 0), None, 5, -16


def _q5_1(blocks: Bytes) -> _Contents:
    low = _nibbles(blocks[:, 8:]).reshape(len(blocks), 32)
    codes = low | _fifth_bits(blocks, 4) << 4
    return codes, _half(blocks, 0), -_half(blocks, 2), 5, 0


def _q8_0(blocks: Bytes) -> _Contents:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None, 8, -128


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """``[blocks, 8]`` each: the scales and minimums of Q4_K and Q5_K."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minimums


def _q4_k(blocks: Bytes) -> _Contents:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(len(blocks), 256)
    return codes, scales, minimums, 4, 0


def _q5_k(blocks: Bytes) -> _Contents:
    scales, minimums = _scales_and_minimums(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = blocks[:, None, 16:48] >> shifts & 1
    return (low | high << 4).reshape(len(blocks), 256), scales, minimums, 5, 0


def _q6_k(blocks: Bytes) -> _Contents:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = (2 * np.arange(4, dtype=np.uint8))[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).reshape(len(blocks), 256)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return codes.astype(np.int8) - 32, scales, None, 6, -32


_BLOCKS: Mapping[str, tuple[int, Callable[[Bytes], _Contents]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
