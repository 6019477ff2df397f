"""Allocation of large host memory (caches, weights), and release of freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE_BYTES = 64
_LARGE_PAGE_BYTES = 2 << 20


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros aligned to a cache line, whose pages become resident only when they are written."""
    size = math.prod(shape) * dtype.itemsize
    flat = np.zeros(size + _CACHE_LINE_BYTES - 1, dtype=np.uint8)
    first = -flat.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(flat[first : first + size]).view(dtype).view(shape)


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous tensor, copied to huge pages if it is at least as large as one.

    A processor's TLB holds a few thousand addresses. Weights of some hundred megabytes cover more
    pages of the usual size, so that every pass would miss the TLB again for each of them. Where the
    system has no huge pages, the tensor itself is returned, made contiguous.
    """
    size = tensor.nbytes
    if (
        tensor.device.type != "cpu"
        or size < _LARGE_PAGE_BYTES
        or not hasattr(mmap, "MADV_HUGEPAGE")
    ):
        return tensor.contiguous()
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _LARGE_PAGE_BYTES, flags=private)
    flat = np.frombuffer(memory, dtype=np.uint8)
    first = -flat.ctypes.data % _LARGE_PAGE_BYTES
    # Only whole huge pages, so that the rest does not occupy one more.
    with contextlib.suppress(OSError):  # a kernel built without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, size // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES)
    copy = torch.from_numpy(flat[first : first + size]).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def return_free_memory() -> None:
    """Return freed host memory to the system, and freed GPU memory to other processes.

    glibc keeps freed memory below the highest block in use, which may be most of a dropped model's
    weights. PyTorch caches all freed GPU memory. Other host allocators are not affected.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and not torch.cuda.is_current_stream_capturing():
        torch.cuda.empty_cache()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return cast(Callable[[int], int], trim)
