"""Memory for what is large: caches, and weights that every pass reads; and giving it back."""

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
    """Zeros whose memory is not touched before it is written and starts a cache line."""
    size = math.prod(shape) * dtype.itemsize
    flat = np.zeros(size + _CACHE_LINE_BYTES - 1, dtype=np.uint8)
    first = -flat.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(flat[first : first + size]).view(dtype).view(shape)


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous tensor: a copy in large pages if it is as large as one and the system has them.

    A processor looks up where each page lies, and remembers a few thousand. Weights of some hundred
    megabytes are more pages of the usual size, and are all looked up again in every pass.
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
    # Whole pages only: the rest takes no more memory than it needs.
    with contextlib.suppress(OSError):  # a system that knows the word and was built without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, size // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES)
    copy = torch.from_numpy(flat[first : first + size]).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def return_free_memory() -> None:
    """Give memory that was freed back to the system, and that of a GPU to other processes.

    glibc keeps what lies below something that is still in use, which after a model was dropped is
    most of its weights. PyTorch keeps all memory of a GPU. Other allocators are left alone.
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
