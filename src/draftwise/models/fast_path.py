"""Detection of models that do not run on the fast path of their device.

On a CPU, the fast path is the forward pass of the native kernels. On CUDA, it is the captured steps
of models whose forward pass is written out in :mod:`draftwise.models.decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from draftwise.checkpoints.quantization import has_quantized_weights
from draftwise.kernels.native.suitability import (
    is_large,
    lacks_instructions,
    why_not_native,
    why_not_packed_whole,
)
from draftwise.models.decoder_families import why_not_described, why_not_operations
from draftwise.models.packed_modules import has_packed_modules

# Time of a decoding pass on a CPU relative to the native kernels in bfloat16, for models that stay
# in the processor's caches and for larger ones. ``docs/cpu.md`` describes the measurement.
# Combinations without an entry were not measured.
_SLOWDOWNS = {
    # (with PyTorch's operations written out, with Hugging Face's modules)
    torch.bfloat16: {"small": ("4", "6"), "large": ("1.5 to 6", "2.5 to 6")},
    torch.float32: {"small": ("4", "6"), "large": ("4", "4")},
    torch.float16: {"small": ("3 to 7", ""), "large": ("2 to 10", "")},
}
# Time of a step on CUDA relative to a captured step; see ``docs/cuda.md``.
_CUDA_SLOWDOWN = "2 to 5"


@dataclass(frozen=True)
class SlowPath:
    """The reason why a model is slower than others of its size, and the slowdown.

    Attributes:
        reason: a clause, such as ``"its weights are float16, not bfloat16 or float32"``.
        slowdown: time of a decoding pass relative to the fast path, such as ``"4"`` or
            ``"2 to 5"``; empty if it was not measured.
        rounds: whether results are rounded so coarsely, and in another order in each size of a
            pass, that greedy texts may depend on the other requests of the batch.
    """

    reason: str
    slowdown: str
    rounds: bool = False

    def __str__(self) -> str:
        cost = (
            f"expect passes to take about {self.slowdown} times as long"
            if self.slowdown
            else "what that costs was not measured"
        )
        varies = ", and greedy texts may depend on the other requests of a batch"
        return f"{self.reason}; {cost}{varies if self.rounds else ''}"


def slow_path(model: nn.Module) -> SlowPath | None:
    """The reason why a model does not run on the fast path; ``None`` if it does.

    Args:
        model: a loaded model whose weights are not packed yet.
    """
    first = next(model.parameters())
    device, rounds = first.device.type, first.dtype != torch.float32
    if device == "meta":  # the weights are blocks of a file
        device = "cpu"
    if device not in ("cpu", "cuda"):
        return SlowPath(f"there is no fast path for {device}", "", rounds)
    modules = _why_modules(model, why_not_operations)
    if device == "cuda":
        return None if modules is None else SlowPath(modules, _CUDA_SLOWDOWN, rounds)
    reason = _why_modules(model, why_not_described) or why_not_native(model)
    if reason is None:
        return None
    if modules is None and is_large(model) and lacks_instructions():
        return SlowPath(reason, "", rounds)
    slowdowns = _SLOWDOWNS.get(first.dtype, {})
    size = "large" if is_large(model) else "small"
    return SlowPath(reason, slowdowns.get(size, ("", ""))[modules is not None], rounds)


def _why_modules(
    model: nn.Module, why_not_computed: Callable[[nn.Module], str | None]
) -> str | None:
    """The reason why Hugging Face's modules compute a model; ``None`` if they do not.

    Args:
        model: the model.
        why_not_computed: why Draftwise's forward pass does not compute it.
    """
    reason = why_not_computed(model)
    if reason is not None:
        return f"{reason}, which Draftwise's own forward pass does not compute"
    if has_quantized_weights(model):
        return "its quantised weights are multiplied by torchao"
    if has_packed_modules(model):
        return why_not_packed_whole(model)
    return None
