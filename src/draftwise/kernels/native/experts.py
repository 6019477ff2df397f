"""Experts of a layer, packed for the kernels of ``experts.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.checkpoints.quantization import (
    BlockRows,
    StoredExperts,
    forget_stored,
    stored_experts,
)
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.packed import packed_weight, why_not_packed
from draftwise.kernels.native.panels import interleaved, padded_to_panels, panels
from draftwise.kernels.native.structures import Experts
from draftwise.models.experts_spec import ExpertsSpec, Scoring
from draftwise.models.memory import in_large_pages

# Scores in the order of ``Scoring`` of ``experts.h``.
_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID)


def are_packed(experts: Sequence[ExpertsSpec]) -> bool:
    """Whether the experts of all layers are packed as the integers that they are stored as."""
    return bool(experts) and all(stored_experts(each.module) for each in experts)


def why_experts_not_packed(spec: ExpertsSpec) -> str | None:
    """Why the kernels cannot pack stored experts, as a clause; ``None`` if they can."""
    stored = stored_experts(spec.module)
    if not stored:
        return "its experts are stored without blocks"
    return why_not_packed([stored["gate_up_proj"]], True) or why_not_packed([stored["down_proj"]])


class NativeExperts:
    """The packed experts of a layer. Their module loses its weights.

    Attributes:
        structure: for the kernels.
        bytes_of_a_token: bytes of the matrices that one token reads.
    """

    def __init__(self, spec: ExpertsSpec, library: NativeLibrary, as_stored: bool) -> None:
        """Pack the experts.

        Args:
            spec: the experts.
            library: the compiled kernels.
            as_stored: whether to pack the integers that they are stored as, not their numbers.
        """
        count = len(spec.router)
        self._kept: list[Tensor] = []
        gate_up, down = (
            self._addresses(each) for each in (_packed if as_stored else _in_panels)(spec, library)
        )
        router = spec.router
        if spec.shared_gate is not None:
            router = torch.cat([router, spec.shared_gate.unsqueeze(0)])
        self.bytes_of_a_token = spec.num_chosen * sum(each.nbytes for each in self._kept) // count
        self.structure = Experts(
            self._keep(router),
            None if spec.correction is None else self._keep(spec.correction),
            ctypes.addressof(gate_up),
            ctypes.addressof(down),
            *self._biases(spec, library),
            count,
            spec.num_chosen,
            spec.inner_size,
            _SCORINGS.index(spec.scoring),
            spec.normalises,
            spec.shared_gate is not None,
            spec.scale,
            *(spec.limits or (0.0, 0.0)),
        )
        self._arrays = gate_up, down
        _release(spec.module)

    def _biases(self, spec: ExpertsSpec, library: NativeLibrary) -> list[int | None]:
        """The addresses of the router's, the gates', the up and the down projections' biases."""
        biases = spec.biases
        if biases is None:
            return [None] * 4
        whole_vectors = (0, -spec.inner_size % library.lanes)
        gate, up = (F.pad(each, whole_vectors) for each in (biases.gate, biases.up))
        down = padded_to_panels(biases.down, library)
        return [self._keep(each) for each in (biases.router, gate, up, down)]

    def _keep(self, tensor: Tensor) -> int:
        """Keep a reference to a tensor, made contiguous, and return its address."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _addresses(self, matrices: Iterator[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        addresses = [self._keep(each) for each in matrices]
        return (ctypes.c_void_p * len(addresses))(*addresses)


def _packed(spec: ExpertsSpec, library: NativeLibrary) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """The stored integers of gate and up projection, and of the down projection."""
    stored, count = stored_experts(spec.module), len(spec.router)
    gate_up = _of_experts(stored["gate_up_proj"], count)
    down = _of_experts(stored["down_proj"], count)
    return (
        (packed_weight([each], library, True) for each in gate_up),
        (packed_weight([each], library) for each in down),
    )


def _of_experts(parts: StoredExperts, count: int) -> Iterator[Sequence[BlockRows]]:
    """The rows of each expert, in the parts of the file."""
    sizes = [len(part) // count for part in parts]
    for expert in range(count):
        yield [
            part.rows(expert * size, (expert + 1) * size)
            for part, size in zip(parts, sizes, strict=True)
        ]


def _in_panels(
    spec: ExpertsSpec, library: NativeLibrary
) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """The numbers of gate and up projection, and of the down projection."""

    def joined(gate: Tensor, up: Tensor, _: Tensor) -> Tensor:
        return in_large_pages(panels(interleaved(gate, up, library), library))

    every = range(len(spec.router))
    return (
        (joined(*spec.matrices(expert)) for expert in every),
        (in_large_pages(panels(spec.matrices(expert)[2], library)) for expert in every),
    )


def _release(module: nn.Module) -> None:
    """Replace the weights of experts by meta tensors."""
    own: Any = module
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(own, name)
        setattr(own, name, nn.Parameter(torch.empty_like(weight, device="meta"), False))
    forget_stored(module)
