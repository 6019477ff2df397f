"""Whether there is a kernel, and where it comes from."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftwise.models.native import library as native

HAS_KERNEL = native.native_library() is not None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="no kernel on this machine")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, and a process that has looked for no kernel yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTWISE_CACHE", str(folder))
    monkeypatch.delenv("DRAFTWISE_NATIVE", raising=False)
    native._load.cache_clear()
    yield folder
    native._load.cache_clear()


def built(folder):
    return list((folder / "native").iterdir())


@needs_kernel
def test_built_once(cache, monkeypatch):
    assert native.kernel_in_use() == "native"
    [library] = built(cache)
    made = library.stat().st_mtime_ns
    native._load.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.native_library() is not None
    assert [path.stat().st_mtime_ns for path in built(cache)] == [made]


@needs_kernel
def test_the_folder_is_the_users_alone(cache):
    native.native_library()
    assert (cache / "native").stat().st_mode & 0o777 == 0o700
    native._load.cache_clear()
    (cache / "native").chmod(0o777)
    assert native.native_library() is None
    assert "is not this user's alone" in native.kernel_in_use()


@needs_kernel
def test_another_compiler_makes_another_library(cache, monkeypatch):
    native.native_library()
    native._load.cache_clear()
    monkeypatch.setattr(native, "_OPTIONS", (*native._OPTIONS, "-DANOTHER"))
    native.native_library()
    assert len(built(cache)) == 2


def test_switched_off(cache, monkeypatch):
    monkeypatch.setenv("DRAFTWISE_NATIVE", "0")
    assert native.native_library() is None
    assert native.kernel_in_use() == "PyTorch (DRAFTWISE_NATIVE is 0)"
    assert not cache.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux only")
class TestWithoutCompiler:
    def test_none_found(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert native.kernel_in_use() == "PyTorch (no C++ compiler found)"

    def test_one_that_fails(self, cache, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no way" >&2; exit 1; }\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert native.kernel_in_use() == f"PyTorch ({compiler} failed: no way)"
        assert not built(cache)

    def test_one_that_makes_no_library(self, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_text("#!/bin/sh\nexit 0\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert native.native_library() is None

    def test_one_that_is_no_program(self, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_bytes(b"\x00\x01")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert native.native_library() is None

    def test_a_cache_that_is_no_folder(self, cache):
        cache.write_text("")
        assert native.native_library() is None
        assert native.kernel_in_use().startswith("PyTorch (")


def _build(start, results):
    start.wait()
    results.put(native.kernel_in_use())


@needs_kernel
def test_processes_that_build_at_once(cache):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_build, args=(start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    start.set()
    assert [results.get() for _ in processes] == ["native"] * 2
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(built(cache)) == 1


@needs_kernel
def test_one_openmp_runtime():
    """The kernel brings no threads of its own."""
    script = """
import torch
from pathlib import Path
from draftwise.models.native.library import native_library

def runtimes():
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line.rpartition("/")[2]}
    return {file for file in files if file.startswith("/")}

torch.ones(1000, 1000) @ torch.ones(1000, 1000)
before = runtimes()
assert native_library() is not None
assert runtimes() == before, runtimes()
"""
    root = str(Path(native.__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, check=True
    )
