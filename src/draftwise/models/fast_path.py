"""Which models do not run on the fastest forward pass that a device has, and why.

On a CPU that is the native kernels' pass, on CUDA the recorded steps of models that are written out
in :mod:`draftwise.models.llama`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from draftwise.models.decoder_spec import why_not_described
from draftwise.models.native.suitability import (
    is_large,
    multiplies_large_models,
    why_not_native,
)
from draftwise.models.quantization import has_quantized_weights

# How many times as long a decoding pass takes on a CPU as by the native kernels in bfloat16, of a
# model that stays in the processor's caches and of a larger one. ``docs/cpu.md`` says how it was
# measured; what has no entry was not.
_SLOWDOWNS = {
    # by PyTorch's operations written out, and by Hugging Face's modules
    torch.bfloat16: {"small": ("4", "6"), "large": ("1.5 to 3", "2.5 to 3")},
    torch.float32: {"small": ("4", "6"), "large": ("4", "4")},
    torch.float16: {"small": ("3 to 7", ""), "large": ("2 to 10", "")},
}
# On CUDA: steps that are not recorded over steps that are; see ``docs/cuda.md``.
_CUDA_SLOWDOWN = "2 to 5"


@dataclass(frozen=True)
class SlowPath:
    """Why a model is computed more slowly than others of its size.

    Attributes:
        reason: a clause, such as ``"its weights are float16, not bfloat16 or float32"``.
        slowdown: how many times as long a decoding pass takes, such as ``"4"`` or ``"2 to 5"``;
            empty where it was not measured.
    """

    reason: str
    slowdown: str

    def __str__(self) -> str:
        if not self.slowdown:
            return f"{self.reason}; what that costs was not measured"
        return f"{self.reason}; expect passes to take about {self.slowdown} times as long"


def slow_path(model: nn.Module) -> SlowPath | None:
    """Why a model does not run on the fast path; ``None`` if it does.

    Args:
        model: loaded, and not taken over by a forward pass yet.
    """
    device = next(model.parameters()).device.type
    if device not in ("cpu", "cuda"):
        return SlowPath(f"there is no fast path for {device}", "")
    modules = _why_modules(model)
    if device == "cuda":
        return None if modules is None else SlowPath(modules, _CUDA_SLOWDOWN)
    reason = modules or why_not_native(model)
    if reason is None:
        return None
    if modules is None and is_large(model) and not multiplies_large_models():
        return SlowPath(reason, "")
    slowdowns = _SLOWDOWNS.get(next(model.parameters()).dtype, {})
    size = "large" if is_large(model) else "small"
    return SlowPath(reason, slowdowns.get(size, ("", ""))[modules is not None])


def _why_modules(model: nn.Module) -> str | None:
    """Why a model is computed by Hugging Face's modules; ``None`` if it is not."""
    reason = why_not_described(model)
    if reason is not None:
        return f"{reason}, which Draftwise's own forward pass does not compute"
    if has_quantized_weights(model):
        return "its quantised weights are multiplied by torchao"
    return None
