"""Linear layers whose weights are stored in the layout of the CPU's matrix kernels.

``F.linear`` reorders the weight at every call. Reordering it once at load, to oneDNN's own layout,
is up to twice as fast for the few tokens of a decoding step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from draftwise.devices import has_fast_bfloat16

# oneDNN and PyTorch cache a compiled kernel of up to 0.7 MB for every shape, by default up to 1024
# of them. As step sizes vary, the caches would fill up. Compiling a kernel again takes half a
# millisecond.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MAX_KERNELS = 256

# (largest number of rows, multiple): the rows of a matrix product are padded to a multiple, as a
# kernel is compiled for every number of rows and a step may verify any number of tokens. Larger
# products are padded to a multiple of the last step.
_ROW_STEPS = ((4, 1), (32, 4), (64, 8), (128, 16), (256, 32))
_LAST_ROW_STEP = 64

_BLOCKABLE = (torch.bfloat16, torch.float32)


Linear = Callable[[Tensor], Tensor]


def padded_rows(num_rows: int) -> int:
    """The number of rows that a matrix product of ``num_rows`` rows is padded to."""
    step = next((step for largest, step in _ROW_STEPS if num_rows <= largest), _LAST_ROW_STEP)
    return -(-num_rows // step) * step


# Linear layers whose weights other modules multiply with: the step sizes of Mamba.
_READ_BY_PARENT = frozenset({"dt_proj"})


class BlockedLinear(nn.Module):
    """``nn.Linear`` for inference on the CPU, with its weight in oneDNN's layout.

    Attributes:
        weight: meta tensor with the weight's shape and dtype, for models that read them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Reorder a weight ``[out_features, in_features]`` and an optional bias."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.empty_like(weight, device="meta", requires_grad=False)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        rows = inputs.shape[:-1].numel()
        missing = padded_rows(rows) - rows
        flat = inputs.reshape(rows, self.in_features)
        if missing:
            flat = F.pad(flat, (0, 0, 0, missing))
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            flat, self._weight, self._bias, "none", [], ""
        )
        return result[:rows].view(*inputs.shape[:-1], self.out_features)


def limit_kernel_cache() -> None:
    """Limit the memory of cached kernels. Must run before the first matrix product.

    Values that the user has set in the environment are kept.
    """
    for variable in _KERNEL_CACHES:
        os.environ.setdefault(variable, str(_MAX_KERNELS))


def can_block(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of PyTorch can reorder weights of this dtype for this processor."""
    return (
        device.type == "cpu"
        and dtype in _BLOCKABLE
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype != torch.bfloat16 or has_fast_bfloat16(device))
    )


def block_linear_layers(model: nn.Module) -> int:
    """Replace the linear layers of a model in place and return their number."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in _READ_BY_PARENT:
                continue
            if type(child) is nn.Linear:
                blocked = BlockedLinear(child.weight, child.bias)
            elif type(child) is Conv1D:
                weight, bias = cast(Tensor, child.weight), cast(Tensor, child.bias)
                blocked = BlockedLinear(weight.T, bias)
            else:
                continue
            setattr(parent, name, blocked)
            replaced += 1
    return replaced


def join_linear(layers: list[nn.Linear]) -> Linear:
    """Merge several linear layers with the same input into one, reordered where that is possible.

    The layers' own weights are replaced by meta tensors, so that no weight is stored twice. A
    weight shared with the embedding stays in the embedding.

    Args:
        layers: layers with equal ``in_features``, all with a bias or all without.

    Returns:
        A function from ``[..., in_features]`` to ``[..., sum of out_features]``.
    """
    weights: list[Tensor] = [layer.weight.detach() for layer in layers]
    biases: list[Tensor] = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = torch.cat(biases) if biases else None
    for layer in layers:
        layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"))
    if can_block(weight.dtype, weight.device):
        return BlockedLinear(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)
