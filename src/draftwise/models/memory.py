"""Large host memory (caches, weights), its release, and transfers between host and device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CACHE_LINE_BYTES = 64
_LARGE_PAGE_BYTES = 2 << 20
_MAX_REUSED_BYTES = 256 << 20


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros aligned to a cache line, whose pages become resident only when they are written."""
    size = math.prod(shape) * dtype.itemsize
    flat = np.zeros(size + _CACHE_LINE_BYTES - 1, dtype=np.uint8)
    first = -flat.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(flat[first : first + size]).view(dtype).view(shape)


def cache_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a device; on a CPU, pages become resident only when they are written."""
    if device.type == "cpu":
        return host_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


class ReusedMemory:
    """Memory for results of changing size, of which a few are in use at a time.

    The system zeroes every page of newly allocated memory. For the logits of a large vocabulary,
    this takes as long as computing the acceptance law.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[np.uint8], weakref.ref[NDArray[np.uint8]]]] = []

    def floats(self, rows: int, columns: int) -> Tensor:
        """An uninitialised float32 tensor ``[rows, columns]``.

        It may use the memory of an earlier one that no tensor refers to any more. Small tensors and
        those of more than 256 MiB are always newly allocated.
        """
        size = rows * columns * torch.float32.itemsize
        if not _LARGE_PAGE_BYTES <= size <= _MAX_REUSED_BYTES:
            return torch.empty(rows, columns)
        free = [index for index, (_, lent) in enumerate(self._blocks) if lent() is None]
        large = [index for index in free if len(self._blocks[index][0]) >= size]
        memory = self._blocks[large[0]][0] if large else _large_pages(size)
        for index in sorted(large[:1] or free, reverse=True):
            del self._blocks[index]
        # PyTorch keeps this array as long as a tensor refers to its memory.
        array = memory[:size]
        self._blocks.append((memory, weakref.ref(array)))
        return torch.from_numpy(array).view(torch.float32).view(rows, columns)


class ScratchMemory:
    """Memory for the intermediate results of passes that run one after the other.

    Attributes:
        array: the memory. A larger one replaces it when a pass needs more, so a caller that keeps
            an address must also keep the array.
    """

    def __init__(self) -> None:
        self.array: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)

    def address(self, size: int) -> int:
        """Address of at least ``size`` uninitialised bytes, aligned to a cache line."""
        if len(self.array) < size + _CACHE_LINE_BYTES - 1:
            self.array = np.zeros(size + _CACHE_LINE_BYTES - 1, dtype=np.uint8)
        address: int = self.array.ctypes.data
        return address + -address % _CACHE_LINE_BYTES


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous tensor, copied to huge pages if it is at least as large as one.

    A processor's TLB holds a few thousand addresses. Weights of some hundred megabytes cover more
    pages of the usual size, so that every pass would miss the TLB again for each of them. Where the
    system has no huge pages, the tensor itself is returned, made contiguous.
    """
    if (
        tensor.device.type != "cpu"
        or tensor.nbytes < _LARGE_PAGE_BYTES
        or not hasattr(mmap, "MADV_HUGEPAGE")
    ):
        return tensor.contiguous()
    copy = torch.from_numpy(_large_pages(tensor.nbytes)).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def zeros_in_large_pages(size: int) -> Tensor:
    """``[size]`` uint8 zeros, in huge pages if they are at least as large as one."""
    if size < _LARGE_PAGE_BYTES:
        return torch.zeros(size, dtype=torch.uint8)
    return torch.from_numpy(_large_pages(size))


def release_file_pages(array: NDArray[np.uint8]) -> None:
    """Take the pages of a view of a file that is mapped to be read out of this process's memory.

    They are read again from the system's cache of the file when they are used again. Other arrays
    stay as they are.
    """
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    with memoryview(base) as view:
        if not view.readonly:  # such as memory without a file, whose contents would be lost
            return
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        base.madvise(mmap.MADV_DONTNEED, first, size)


def _large_pages(size: int) -> NDArray[np.uint8]:
    """``[size]`` zeros, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(size, dtype=np.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _LARGE_PAGE_BYTES, flags=private)
    flat = np.frombuffer(memory, dtype=np.uint8)
    first = -flat.ctypes.data % _LARGE_PAGE_BYTES
    # Only whole huge pages, so that the rest does not occupy one more.
    with contextlib.suppress(OSError):  # a kernel built without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, size // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES)
    return flat[first : first + size]


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
