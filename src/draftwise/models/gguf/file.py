"""A GGUF file: its header, checks before a model is loaded from it, and what it contains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.models.gguf.blocks import matrix_of_blocks
from draftwise.models.imports import quiet_import
from draftwise.models.lfs import refuse_lfs_pointer
from draftwise.models.quantization import QuantizedMatrix, keep_quantized

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


class GgufFile:
    """A model in a GGUF file, or in several, whose headers were read once.

    Reading the header of a file with a vocabulary of 262,144 tokens takes seconds.

    Attributes:
        path: the file, or the first of several.
    """

    def __init__(self, files: Sequence[Path], role: str) -> None:
        """Read the header, and check that the file is complete.

        Args:
            files: the file, or all parts of a model in several files, in order.
            role: the model's role; named in errors.

        Raises:
            UnsupportedModelError: a file is not a GGUF file, it is truncated, or it contains
                something else than a model.
            ModelNotFoundError: a file is a pointer of Git LFS.
            InvalidParameterError: the packages that read GGUF files are not installed.
        """
        self.path = files[0]
        self._role = role
        readers = [_read(each, role) for each in files]
        self._reader = readers[0]
        for reader in readers[1:]:
            self._reader.tensors.extend(reader.tensors)
        self._check_contents()

    def _check_contents(self) -> None:
        """Refuse files of other things than models, and incomplete ones."""
        name = str(self.path)
        kind, architecture = self._text("general.type"), self._text("general.architecture")
        if kind == "adapter":
            raise UnsupportedModelError(
                self._role,
                f"{name!r} is a LoRA adapter; merge it into its model, with llama.cpp's "
                "llama-export-lora, and use that file",
            )
        if architecture == "clip" or kind == "mmproj":
            raise UnsupportedModelError(
                self._role,
                f"{name!r} is an encoder of images for a model; use the file of the model",
            )
        expected = self._reader.get_field("split.tensors.count")
        count = len(self._reader.tensors)
        if expected is not None and int(expected.contents()) != count:
            raise UnsupportedModelError(
                self._role,
                f"{name!r} and its other parts have {count} of {int(expected.contents())} tensors",
            )
        has_tokens = self._reader.get_field("tokenizer.ggml.tokens") is not None
        is_bpe = self._text("tokenizer.ggml.model") == "gpt2"
        if has_tokens and is_bpe and self._reader.get_field("tokenizer.ggml.merges") is None:
            raise UnsupportedModelError(
                self._role,
                f"{name!r} has no tokenizer.ggml.merges, which its tokenizer needs; convert the "
                "model again",
            )

    def _text(self, key: str) -> str | None:
        field = self._reader.get_field(key)
        return None if field is None else str(field.contents())

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
            matrix = matrix_of_blocks(tensor.tensor_type.name, np.asarray(tensor.data))
            if matrix is None or matrix.numbers.shape != module.weight.shape:
                continue
            num_heads = getattr(config, heads.get(name.rpartition(".")[2], ""), None)
            for candidate in (matrix, *([_in_halves(matrix, num_heads)] if num_heads else [])):
                if _equals(candidate, module.weight):
                    keep_quantized(module, candidate)
                    break


def _read(path: Path, role: str) -> Any:
    """The header of a file."""
    refuse_lfs_pointer(path, role)
    name = str(path)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        reason = error.strerror or error
        raise UnsupportedModelError(role, f"cannot read {name!r}: {reason}") from error
    if not is_gguf:
        raise UnsupportedModelError(role, f"{name!r} is not a GGUF file")
    try:
        return _read_header(path)
    except ImportError as error:
        raise InvalidParameterError(
            role, f"{name!r} needs two packages: pip install 'draftwise[gguf]' ({error})"
        ) from error
    except Exception as error:  # a broken file can make the library raise anything
        raise UnsupportedModelError(
            role, f"{name!r} is truncated or damaged: {_first_line(error)}"
        ) from error


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
