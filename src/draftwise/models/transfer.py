"""Transfers between host and device with as few synchronisations as possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float] | Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers to a device without waiting for it.

    ``torch.tensor(values, device="cuda")`` waits until the device has finished all queued work. A
    copy from pinned memory is queued like a kernel. PyTorch keeps the pinned block until the copy
    is done.

    Args:
        values: numbers, or a tensor of any shape on the host or the device.
        dtype: dtype of the result.
        device: device of the result.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or host.device.type != "cpu" or not host.numel():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors of any shapes and dtypes to the host, waiting for the device only once.

    The copy goes through float64, so integers must not exceed 2**53. If all tensors are on the
    host, they are returned as they are.
    """
    if all(each.device.type == "cpu" for each in tensors):
        return list(tensors)
    numbers = torch.cat([each.flatten().double() for each in tensors]).cpu()
    parts = numbers.split([each.numel() for each in tensors])  # type: ignore[no-untyped-call]
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]
