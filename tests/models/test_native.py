"""Compilation, caching and loading of the native kernels."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftwise.kernels.native import compilation, structures
from draftwise.kernels.native import library as native
from draftwise.kernels.native.instruction_sets import INSTRUCTION_SETS, OPTIONS, SOURCES

from .. import forked
from ..levels import exhaustive_unless

pytestmark = pytest.mark.slow

# Compiled once for this module, because compilation takes several seconds.
COMPILED = compilation.compiled_library() if native.native_library() is not None else None
needs_kernel = pytest.mark.skipif(COMPILED is None, reason="no kernel on this machine")

SLOW_COMPILER = """#!/bin/sh
case "$*" in *--version) echo slow; exit;; esac
echo compiled >> {calls}
sleep 1
while [ "$1" != -o ]; do shift; done
cp {compiled} "$2"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A separate cache folder, and a process that has not loaded a kernel yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTWISE_CACHE", str(folder))
    monkeypatch.delenv("DRAFTWISE_NATIVE", raising=False)
    native._load.cache_clear()
    yield folder
    native._load.cache_clear()


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Calls of a fake compiler, which takes a second and copies an existing library."""
    compiler, lines = tmp_path / "slow", tmp_path / "calls"
    compiler.write_text(SLOW_COMPILER.format(calls=lines, compiled=COMPILED))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return lambda: lines.read_text().splitlines()


def built(folder):
    return list((folder / "native").glob("*.so"))


@needs_kernel
def test_the_library_is_built_once(cache, monkeypatch):
    """Use the machine's own compiler, without its optimisation, which takes most of the time."""
    monkeypatch.setenv("DRAFTWISE_NATIVE_FLAGS", "-O0")
    assert native.kernel_in_use() == "native"
    [library] = built(cache)
    made = library.stat().st_mtime_ns
    native._load.cache_clear()
    monkeypatch.setattr(compilation, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.native_library() is not None
    assert [path.stat().st_mtime_ns for path in built(cache)] == [made]


@needs_kernel
def test_only_the_user_can_access_the_folder(cache, calls):
    native.native_library()
    assert (cache / "native").stat().st_mode & 0o777 == 0o700
    native._load.cache_clear()
    (cache / "native").chmod(0o777)
    assert native.native_library() is None
    assert "is not this user's alone" in native.kernel_in_use()


@needs_kernel
def test_other_options_build_another_library(cache, calls, monkeypatch):
    for flags in ("", "-DONE", "-DONE -DTWO"):
        monkeypatch.setenv("DRAFTWISE_NATIVE_FLAGS", flags)
        native._load.cache_clear()
        assert native.kernel_in_use() == "native"
    assert len(built(cache)) == len(calls()) == 3


@needs_kernel
def test_options_reach_the_compiler(monkeypatch):
    monkeypatch.setenv("DRAFTWISE_NATIVE_FLAGS", "-include /there/is/no/such/file")
    assert "/there/is/no/such/file" in native.kernel_in_use()


def test_kernels_can_be_disabled(cache, monkeypatch):
    monkeypatch.setenv("DRAFTWISE_NATIVE", "0")
    assert native.native_library() is None
    assert native.kernel_in_use() == "PyTorch (DRAFTWISE_NATIVE is 0)"
    assert not cache.exists()


@needs_kernel
def test_exported_names_have_the_prefix():
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", COMPILED], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert "draftwise_accept" in names
    assert [name for name in names if not name.startswith("draftwise_")] == []


@needs_kernel
@pytest.mark.parametrize(
    "processor",
    exhaustive_unless(
        lambda options: options in (("-march=native",), ("-march=x86-64",)),
        [
            ("-march=native",),
            ("-march=x86-64",),
            *(each.options for each in INSTRUCTION_SETS["x86_64"]),
        ],
    ),
    ids=lambda options: options[0] + options[-1],
)
def test_sources_compile_without_warnings(processor):
    """For processors with every vector width, with and without a matrix unit."""
    if processor != ("-march=native",) and platform.machine() != "x86_64":
        pytest.skip("not a processor of this kind")
    options = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", *processor]
    command = [*compilation._compiler(), *OPTIONS, *options]
    done = subprocess.run(
        [*command, SOURCES / "library.cpp"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class TestStructures:
    """Structures are declared in Python and in C++."""

    @needs_kernel
    def test_a_structure_of_another_size_is_refused(self, calls, monkeypatch):
        class Sampling(ctypes.Structure):
            _fields_ = (*structures.Sampling._fields_, ("added", ctypes.c_int64))

        wrong = [Sampling if each is structures.Sampling else each for each in structures._CALLS]
        monkeypatch.setattr(structures, "_CALLS", wrong)
        assert native.native_library() is None
        assert native.kernel_in_use() == (
            "PyTorch (structure Sampling has 40 bytes in Python and 32 in the compiled kernels)"
        )

    def test_fields_have_the_same_names_in_the_same_order(self):
        """A comparison of sizes does not detect two swapped fields of the same size."""
        for structure in structures._CALLS:
            sources = "".join(path.read_text() for path in compilation.SOURCES.glob("*.h"))
            [body] = re.findall(
                rf"^struct {structure.__name__} {{\n(.*?)^}};", sources, re.M | re.S
            )
            body = re.sub(r"//.*", "", body)
            body = re.sub(r"\(\*(\w+)\)\(\)", r"\1", body)  # a pointer to a function
            declared = re.findall(r"(\w+)(?:\[\d+\])?\s*[,;]", body)
            assert declared == [name for name, *_ in structure._fields_]


@pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux only")
class TestWithoutCompiler:
    def test_no_compiler_is_found(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert native.kernel_in_use() == "PyTorch (no C++ compiler found)"

    def test_a_compiler_that_fails(self, cache, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no way" >&2; exit 1; }\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert native.kernel_in_use() == f"PyTorch ({compiler} failed: no way)"
        assert not built(cache)

    def test_a_compiler_without_output(self, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_text("#!/bin/sh\nexit 0\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert native.native_library() is None

    def test_a_compiler_that_is_not_executable(self, monkeypatch, tmp_path):
        compiler = tmp_path / "broken"
        compiler.write_bytes(b"\x00\x01")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert native.native_library() is None

    def test_a_cache_path_that_is_a_file(self, cache):
        cache.write_text("")
        assert native.native_library() is None
        assert native.kernel_in_use().startswith("PyTorch (")


def _build(environment, barrier, results):
    # The process may have been forked from one with other variables.
    os.environ.clear()
    os.environ.update(environment)
    native._load.cache_clear()
    barrier.wait()
    results.put(native.kernel_in_use())


@needs_kernel
def test_processes_that_start_together_compile_once(cache, calls):
    context = forked.context()
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (dict(os.environ), barrier, results)
    processes = [context.Process(target=_build, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get() for _ in processes] == ["native"] * 2
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(built(cache)) == len(calls()) == 1


@needs_kernel
def test_threads_that_start_together_load_one_library(calls):
    barrier, loaded = threading.Barrier(2), []

    def load():
        barrier.wait()
        loaded.append(native.native_library())

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded[0] is loaded[1] is not None
    assert len(calls()) == 1


@needs_kernel
def test_a_killed_compiler_does_not_block_others(cache, calls):
    """Its lock file still exists, but no process holds the lock."""
    assert native.kernel_in_use() == "native"
    [library] = built(cache)
    library.unlink()
    assert library.with_suffix(".lock").exists()
    native._load.cache_clear()
    assert native.kernel_in_use() == "native"
    assert built(cache) == [library]


@needs_kernel
def test_another_library_is_compiled_meanwhile(cache, calls, monkeypatch):
    """A process that compiles a library has locked that library only."""
    native.native_library()
    [lock] = (cache / "native").glob("*.lock")
    monkeypatch.setenv("DRAFTWISE_NATIVE_FLAGS", "-DANOTHER")
    native._load.cache_clear()
    with compilation._locked(lock):
        loading = threading.Thread(target=native.native_library, daemon=True)
        loading.start()
        loading.join(timeout=60)
        assert not loading.is_alive()
    assert len(built(cache)) == 2


@needs_kernel
def test_only_one_openmp_runtime_is_loaded(calls):
    """The kernels use PyTorch's OpenMP runtime."""
    script = """
import torch
from pathlib import Path
from draftwise.kernels.native.library import native_library

def runtimes():
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line.rpartition("/")[2]}
    return {file for file in files if file.startswith("/")}

torch.ones(1000, 1000) @ torch.ones(1000, 1000)
before = runtimes()
assert native_library() is not None
assert runtimes() == before, runtimes()
"""
    root = str(Path(native.__file__).parents[3])
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, check=True
    )
