"""Which tensors of a GGUF file make which parameter of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftwise.checkpoints.gguf.architectures import QKV
from draftwise.checkpoints.gguf.configuration import architecture_of, is_tied
from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.parameter_names import Joined
from draftwise.checkpoints.gguf.rotary import ROTARY_TENSORS
from draftwise.checkpoints.quantization import BlockRows, in_pieces
from draftwise.errors import UnsupportedModelError

HEAD = "lm_head.weight"
_EMBEDDING = "token_embd.weight"
_FUSED = "attn_qkv"
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor.

    Attributes:
        tensor: its name.
        rows: ``[rows]`` int64, which ones in which order; ``None`` for all.
        scale: name of a tensor of one number that multiplies it; ``None`` for none.
        pieces: ``[pieces]`` int64, the order of the equal pieces of each row; ``None`` for that of
            the file.
    """

    tensor: str
    rows: Tensor | None = None
    scale: str | None = None
    pieces: Tensor | None = None

    def read(self, file: GgufFile, numbers: Tensor) -> Tensor:
        """The numbers in float32, of all numbers of the tensor."""
        if self.scale is not None:
            numbers = numbers * file.read(self.scale)
        if self.pieces is not None:
            numbers = in_pieces(numbers, self.pieces)
        return numbers if self.rows is None else numbers[self.rows]


@dataclass(frozen=True)
class Source:
    """How a parameter is made of a file's tensors.

    Attributes:
        parts: the tensors; none if the file lacks them and need not have them.
        join: computes the parameter; ``None`` if the parts are its rows.
        default: all numbers of a parameter without tensors.
    """

    parts: tuple[Rows, ...]
    join: Callable[..., Tensor] | None = None
    default: float = 0.0

    def read(self, file: GgufFile, shape: torch.Size) -> Tensor:
        """The parameter in float32.

        Raises:
            UnsupportedModelError: the tensors have another shape.
        """
        if not self.parts:
            return torch.full(shape, self.default)
        whole = {name: file.read(name) for name in {part.tensor for part in self.parts}}
        numbers = [part.read(file, whole[part.tensor]) for part in self.parts]
        join = self.join or _below_each_other
        try:
            parameter = join(*numbers)
        except (RuntimeError, IndexError):
            raise self._wrong_shape(file, shape) from None
        if parameter.shape != shape:
            raise self._wrong_shape(file, shape)
        return parameter

    def check_rows(self, file: GgufFile, rows: Sequence[BlockRows], shape: torch.Size) -> None:
        """Refuse rows that do not make a parameter of a shape.

        Raises:
            UnsupportedModelError: they do not.
        """
        if [sum(map(len, rows)), *{each.num_inputs for each in rows}] != list(shape):
            raise self._wrong_shape(file, shape)

    def _wrong_shape(self, file: GgufFile, shape: torch.Size) -> UnsupportedModelError:
        first = self.parts[0].tensor
        return file.error(
            f"has the tensor {first!r} of shape {list(file.tensors[first])}, from which a "
            f"parameter of shape {list(shape)} cannot be made"
        )


def _below_each_other(*numbers: Tensor) -> Tensor:
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def sources(file: GgufFile, parameters: Iterable[str]) -> dict[str, Source]:
    """How each parameter of a model is made of a file's tensors.

    Args:
        file: the file.
        parameters: names of the model's parameters.

    Raises:
        UnsupportedModelError: a tensor is missing, or the file has one that no parameter is made
            of.
    """
    metadata = Metadata(file)
    finder = _Finder(file)
    found = {name: finder.source(name) for name in parameters}
    used = ROTARY_TENSORS | set(architecture_of(file).unused(metadata)) | _used(found)
    for name in file.tensors:
        if name not in used and _layer_of(name) < metadata.num_layers:
            raise file.error(
                f"has the tensor {name!r}, which this architecture or its configuration does not "
                "use, so the model would be computed wrongly"
            )
    return found


def mtp_sources(file: GgufFile, parameters: Iterable[str]) -> dict[str, Source]:
    """How each parameter of the file's MTP layer is made of its tensors.

    Args:
        file: the file.
        parameters: names of the parameters of a ``MtpLayer`` of transformers.

    Raises:
        UnsupportedModelError: a tensor is missing, or the layer has one that no parameter is made
            of.
    """
    finder, layer = _Finder(file), Metadata(file).num_layers
    found = {}
    for name in parameters:
        is_final_norm = name == "post_norm.weight"
        if is_final_norm and f"blk.{layer}.nextn.shared_head_norm.weight" not in file.tensors:
            found[name] = finder.source("model.norm.weight")  # as in llama.cpp
        else:
            found[name] = finder.source(f"model.layers.{layer}.{name.removeprefix('mtp_block.')}")
    copies = {f"blk.{layer}.{name}" for name in architecture_of(file).mtp_copies}
    used = _used(found) | copies
    for name in file.tensors:
        if name not in used and _layer_of(name) == layer:
            raise file.error(f"has the tensor {name!r}, which its MTP layer does not use")
    return found


def _layer_of(tensor: str) -> int:
    """The layer of a tensor; -1 for one that is not of a layer."""
    found = _LAYER.search(tensor) if tensor.startswith("blk.") else None
    return -1 if found is None else int(found[1])


def _used(found: Mapping[str, Source]) -> set[str]:
    """The tensors that parameters are made of."""
    parts = [part for each in found.values() for part in each.parts]
    return {part.tensor for part in parts} | {part.scale for part in parts if part.scale}


@dataclass(frozen=True)
class _Heads:
    """The heads of a layer: how many queries, keys and values have, and their size."""

    counts: dict[str, int]
    size: int


class _Finder:
    """Finds the tensors of parameters."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._architecture = file, architecture_of(file)
        self._is_tied = is_tied(file)
        own = self._architecture.joined_by(Metadata(file))
        self._joined = {**self._architecture.joined, **own}

    def source(self, parameter: str) -> Source:
        """How a parameter is made.

        Raises:
            UnsupportedModelError: a tensor is missing.
        """
        if parameter == HEAD and self._is_tied:
            return Source((Rows(_EMBEDDING),))
        layer = _LAYER.search(parameter)
        number = layer[1] if layer else ""
        pattern = _LAYER.sub(".*.", parameter)
        joined = self._joined.get(pattern)
        if joined is not None:
            tensors = [name.replace("*", number) for name in joined.tensors]
            missing = [name for name in tensors if name not in self._file.tensors]
            if missing and joined.default is not None:
                return Source((), default=joined.default)
            if missing:
                raise self._missing(missing[0], parameter)
            return Source(tuple(self._chosen(tensors, joined)), joined.join)
        module, _, kind = pattern.rpartition(".")
        if module not in self._architecture.modules:
            raise self._file.error(f"has no tensor for the parameter {parameter!r}")
        base = self._architecture.modules[module].replace("*", number)
        parts = self._parts(base, kind, parameter)
        if self._architecture.adds_one and base.endswith("norm") and kind == "weight":
            return Source(parts, _without_one)
        return Source(parts)

    def _chosen(self, tensors: Sequence[str], joined: Joined) -> Iterator[Rows]:
        """Rows of tensors in an order, which is cut where it goes on in another tensor."""
        rows = joined.rows
        if rows is None or len(tensors) == 1:
            yield from (Rows(name, rows, pieces=joined.pieces) for name in tensors)
            return
        sizes = [self._file.tensors[name][0] for name in tensors]
        if sum(sizes) != len(rows):
            raise self._file.error(
                f"has {sum(sizes)} rows in the tensors {', '.join(map(repr, tensors))}, and the "
                f"heads of the model have {len(rows)}"
            )
        owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        places = torch.cat([torch.arange(size) for size in sizes])
        runs, lengths = torch.unique_consecutive(owners[rows], return_counts=True)
        for owner, part in zip(runs.tolist(), torch.split(rows, lengths.tolist()), strict=True):
            yield Rows(tensors[owner], places[part], pieces=joined.pieces)

    def _parts(self, base: str, kind: str, parameter: str) -> tuple[Rows, ...]:
        """The tensors of a module's weight or bias; none for a bias that counts as zero."""
        block, _, part = base.rpartition(".")
        if f"{base}.{kind}" in self._file.tensors:
            return (self._whole(base, kind),)
        fused = f"{block}.{_FUSED}.{kind}"
        if part in QKV and fused in self._file.tensors:
            return (self._part_of_fused(fused, part),)
        separate = [f"{block}.{each}" for each in QKV]
        if part == _FUSED and all(f"{each}.{kind}" in self._file.tensors for each in separate):
            return tuple(self._whole(each, kind) for each in separate)
        if kind == "bias" and part in self._architecture.optional_biases:
            return ()
        raise self._missing(f"{base}.{kind}", parameter)

    def _whole(self, base: str, kind: str) -> Rows:
        """All rows of a tensor."""
        name, scale = f"{base}.{kind}", f"{base}.scale"
        has_scale = kind == "weight" and self._file.tensors.get(scale) in ((), (1,))
        part = base.rpartition(".")[2]
        rows = None
        if self._is_permuted(part):
            rows = self._in_halves(name, part, torch.arange(self._file.tensors[name][0]))
        return Rows(name, rows, scale if has_scale else None)

    def _part_of_fused(self, name: str, part: str) -> Rows:
        """The rows of queries, keys or values in a tensor of all three."""
        sizes = [num * self._heads.size for num in self._heads.counts.values()]
        if self._file.tensors[name][0] != sum(sizes):
            shape = list(self._file.tensors[name])
            raise self._file.error(
                f"has the tensor {name!r} of shape {shape}, and queries, keys and values have "
                f"{sum(sizes)} numbers"
            )
        rows = torch.split(torch.arange(sum(sizes)), sizes)[QKV.index(part)]
        return Rows(name, self._in_halves(name, part, rows) if self._is_permuted(part) else rows)

    @cached_property
    def _heads(self) -> _Heads:
        metadata = Metadata(self._file)
        hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
        kv_heads = metadata.value("attention.head_count_kv", heads)
        if isinstance(kv_heads, list):  # of layers without attention it is 0
            kv_heads = max(kv_heads)
        counts = dict(zip(QKV, (heads, kv_heads, kv_heads), strict=True))
        return _Heads(counts, metadata.count("attention.key_length", hidden // heads))

    def _is_permuted(self, part: str) -> bool:
        return self._architecture.is_permuted and part in QKV[:2]

    def _in_halves(self, name: str, part: str, rows: Tensor) -> Tensor:
        """Put the numbers that are rotated together half a head apart.

        Files store them next to each other.
        """
        num_heads = self._heads.counts[part]
        if len(rows) != num_heads * self._heads.size:
            raise self._file.error(
                f"has the tensor {name!r} of {len(rows)} rows for {num_heads} heads of "
                f"{self._heads.size}"
            )
        return rows.reshape(num_heads, -1, 2).transpose(1, 2).flatten()

    def _missing(self, tensor: str, parameter: str) -> UnsupportedModelError:
        return self._file.error(f"has no tensor {tensor!r}, which {parameter!r} is made of")


def _without_one(weight: Tensor) -> Tensor:
    return weight - 1
