"""Devices by their names."""

from __future__ import annotations

import torch

from draftwise.errors import InvalidParameterError


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 about as fast as float32, or faster.

    Processors without AVX-512 only emulate it.
    """
    if device.type == "cuda":
        return True
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fast_dtype(device: torch.device) -> torch.dtype:
    """Bfloat16 where PyTorch's operations multiply it fast on the device, otherwise float32."""
    return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32


def resolve_device(device: str | torch.device) -> torch.device:
    """Resolve a device. ``"auto"`` is CUDA where it is available, otherwise the CPU.

    Raises:
        InvalidParameterError: not a device, or not available.
    """
    if not isinstance(device, str | torch.device):
        raise InvalidParameterError("device", f"must name a device, got {device!r}")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise InvalidParameterError(
            "device", f"{str(device)!r} is not available: {error}"
        ) from error
    return resolved
