"""Large tensors in host memory: equal values, and no more memory than their size."""

import gc
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwise.models.memory import (
    ReusedMemory,
    ScratchMemory,
    host_zeros,
    in_large_pages,
    release_file_pages,
    zeros_in_large_pages,
)

pytestmark = pytest.mark.slow

LARGE = 2 << 20


def resident():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    gc.collect()  # exclude garbage of earlier tests
    return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) << 10


def test_a_copy_has_the_same_values():
    for dtype in [torch.float32, torch.bfloat16, torch.int8]:
        for num_bytes in [LARGE, 3 * LARGE, 2 * LARGE + 4096]:
            tensor = torch.arange(num_bytes // dtype.itemsize).to(dtype).view(-1, 32).t()
            copy = in_large_pages(tensor)
            assert torch.equal(copy, tensor), dtype
            assert copy.dtype == dtype
            assert copy.is_contiguous(), dtype
            assert copy.data_ptr() % 64 == 0, dtype


def test_small_tensors_are_not_copied():
    tensor = torch.zeros(LARGE // 4 - 1)
    assert in_large_pages(tensor) is tensor
    assert in_large_pages(torch.zeros(32, 64).t()).is_contiguous()


def test_systems_that_refuse_huge_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    tensor = torch.arange(LARGE)
    assert torch.equal(in_large_pages(tensor), tensor)


def test_zeros_use_no_memory_before_they_are_written():
    before, size = resident(), 64 * LARGE
    zeros = host_zeros((size // 4,), torch.float32)
    assert resident() - before < 0.1 * size
    zeros[: len(zeros) // 2] = 1
    assert 0.4 * size < resident() - before < 0.7 * size
    assert not zeros[len(zeros) // 2 :].any()


def test_the_memory_of_a_copy_is_released():
    """It lives as long as a view of the tensor, and it is as large as the tensor."""
    before, size = resident(), 64 * LARGE
    copy = in_large_pages(torch.ones(size, dtype=torch.uint8))
    part = copy[LARGE:]
    del copy
    assert part.all()
    assert 0.9 * size < resident() - before < 1.2 * size
    del part
    assert resident() - before < 0.2 * size


class TestReusedMemory:
    def test_free_memory_is_used_again(self):
        memory = ReusedMemory()
        first = memory.floats(1000, 1000)
        address = first.data_ptr()
        del first
        assert memory.floats(900, 1000).data_ptr() == address

    def test_memory_in_use_is_not_lent_again(self):
        memory = ReusedMemory()
        first = memory.floats(1000, 1000)
        part = first[5:].view(-1)
        del first
        second = memory.floats(1000, 1000)
        part.fill_(1.0)
        second.fill_(2.0)
        assert bool((part == 1.0).all())
        third = memory.floats(10, 1000)
        assert third.shape == (10, 1000)


def test_scratch_memory_is_replaced_where_it_is_too_small():
    scratch = ScratchMemory()
    first = scratch.address(1000)
    array = scratch.array
    assert scratch.address(10) == first
    assert scratch.array is array
    assert first % 64 == 0
    assert array.ctypes.data <= first
    assert first + 1000 <= array.ctypes.data + len(array)
    larger = scratch.address(100_000)
    assert larger % 64 == 0
    assert larger + 100_000 <= scratch.array.ctypes.data + len(scratch.array)


def resident_kib(path):
    """Memory that this process has of a mapped file."""
    maps = Path("/proc/self/smaps").read_text().splitlines()
    start = next(index for index, line in enumerate(maps) if line.endswith(str(path)))
    rss = next(line for line in maps[start:] if line.startswith("Rss:"))
    return int(rss.split()[1])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the memory is read on Linux")
def test_pages_of_a_file_are_given_back_and_read_again(tmp_path):
    path = tmp_path / "weights"
    written = np.arange(1 << 20, dtype=np.uint8)
    written.tofile(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8, (1 << 20) - 100, 100).reshape(-1, 4)
    assert view.sum()
    assert resident_kib(path) >= 1000
    release_file_pages(view)
    assert resident_kib(path) <= 64
    assert np.array_equal(view.ravel(), written[100:])


def test_memory_that_no_file_contains_is_not_given_back():
    own = np.ones(1 << 20, dtype=np.uint8)
    release_file_pages(own)
    assert own.all()
    pages = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    pages += 1
    release_file_pages(pages)
    assert pages.all()


def test_zeros_of_any_size():
    for size in (100, 5 << 20):
        zeros = zeros_in_large_pages(size)
        assert zeros.shape == (size,)
        assert not bool(zeros.any())
        zeros += 1
        assert bool(zeros.all())
