"""Numbers on their way to the device, without making the host wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float] | Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Host numbers as a tensor on a device.

    A plain ``torch.tensor(values, device="cuda")`` waits until the device has finished everything
    that was queued before. From pinned memory the copy is queued like a kernel; PyTorch keeps the
    pinned block until the copy is done.

    Args:
        values: numbers, or a tensor of any shape (one that is on the device already stays there).
        dtype: of the result.
        device: where it goes.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or host.device.type != "cpu" or not host.numel():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Tensors on the host, of any shapes and types, waiting for the device only once.

    Integers must be exact as float64. Tensors that are on the host are returned as they are.
    """
    if all(each.device.type == "cpu" for each in tensors):
        return list(tensors)
    numbers = torch.cat([each.flatten().double() for each in tensors]).cpu()
    parts = numbers.split([each.numel() for each in tensors])  # type: ignore[no-untyped-call]
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]
