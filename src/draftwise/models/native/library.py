"""The kernels in C++: compiled on this machine at first use, kept in the user's cache folder.

Without a compiler, or anything else that it takes, there are none and PyTorch's own operations do
their work. :func:`kernel_in_use` says which it is. ``DRAFTWISE_NATIVE=0`` switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftwise.zoo.registry import cache_folder

NATIVE_VARIABLE = "DRAFTWISE_NATIVE"

_SOURCES = Path(__file__).with_name("source")
_MAIN = _SOURCES / "library.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast"),
    *("-fno-strict-aliasing", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"),
)
_COMPILER_TIMEOUT_S = 120
# Of /proc/cpuinfo: what decides the instructions that are compiled for.
_PROCESSOR_FIELDS = ("model name", "flags", "Features", "CPU part")

_log = logging.getLogger(__name__)


class NativeUnavailableError(Exception):
    """Why there is no kernel; never leaves this module."""


class Threads(ctypes.Structure):
    """``Threads`` of ``threads.h``."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("team_size", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class NativeLibrary:
    """The compiled functions; see ``library.cpp``.

    Attributes:
        attention: attends to a cache.
        attention_scratch: floats that each thread needs for it.
        decode: a whole pass of a Llama.
        decoder_memory: bytes that it needs.
        accept: the acceptance law.
        count_exponents: how often numbers of bfloat16 have each exponent.
        compress: numbers of bfloat16 as twelve bits.
        distributions: softmax with all that goes with it.
        draft: several tokens of a draft model.
        judge: what a companion thinks of a draft.
        lanes: numbers in a vector.
        multiplies_pairs: whether weights of bfloat16 are laid out in pairs.
        multiplies_tiles: whether the processor's matrix unit multiplies them, where a model's sizes
            are whole tiles.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.attention = _function(library.attention, None, pointer, pointer)
        self.attention_scratch = _function(library.attention_scratch, number, *[number] * 6)
        self.decode = _function(library.decode, None, pointer)
        self.decoder_memory = _function(
            library.decoder_memory, number, pointer, number, number, number
        )
        self.accept = _function(library.accept, None, pointer, pointer)
        self.distributions = _function(library.distributions, None, pointer, pointer)
        self.count_exponents = _function(library.count_exponents, None, pointer, number, pointer)
        self.compress = _function(
            library.compress, None, pointer, number, pointer, pointer, pointer
        )
        self.draft = _function(library.draft, None, pointer)
        self.judge = _function(library.judge, None, pointer, pointer)
        self.lanes: int = _function(library.lanes, number)()
        self.multiplies_pairs = bool(_function(library.multiplies_pairs, number)())
        self.multiplies_tiles = bool(_function(library.multiplies_tiles, number)())
        self._runtime = _addresses_of_threads()

    def threads(self, count: int | None = None) -> Threads:
        """So many of PyTorch's threads; ``None`` for as many as it uses."""
        return Threads(*self._runtime, torch.get_num_threads() if count is None else count)


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def native_library() -> NativeLibrary | None:
    """The kernels, compiled if need be, or ``None`` where there are none."""
    return _load()[0]


def library_for(device: torch.device) -> NativeLibrary | None:
    """The kernels for tensors that lie there."""
    return native_library() if device.type == "cpu" else None


def kernel_in_use() -> str:
    """``"native"``, or ``"PyTorch"`` with the reason why there are no kernels."""
    library, reason = _load()
    return "native" if library else f"PyTorch ({reason})"


@functools.cache
def _load() -> tuple[NativeLibrary | None, str]:
    try:
        library = NativeLibrary(ctypes.CDLL(str(_build())))
    except (NativeUnavailableError, OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.debug("models are computed by PyTorch: %s", error)
        return None, str(error)
    _log.debug("models are computed by the native kernels")
    return library, ""


def _build() -> Path:
    """The library's file, compiled unless it is there."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        raise NativeUnavailableError(f"{NATIVE_VARIABLE} is 0")
    if sys.platform != "linux":
        raise NativeUnavailableError(f"no native kernels for {sys.platform}")
    command = _compiler()
    folder = _own_folder(cache_folder() / "native")
    built = folder / f"kernels-{_fingerprint(command)}.so"
    if not built.exists():
        _compile(command, built)
    return built


def _compiler() -> list[str]:
    """Start of the command line that compiles C++."""
    configured = shlex.split(os.environ.get("CXX", ""))
    found = next(filter(None, map(shutil.which, configured[:1] or _COMPILERS)), None)
    if found is None:
        raise NativeUnavailableError("no C++ compiler found")
    return [found, *configured[1:]]


def _own_folder(folder: Path) -> Path:
    """Make a folder that nobody else can write to: what lies there is loaded as code."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & others:
        raise NativeUnavailableError(f"{folder} is not this user's alone")
    return folder


def _fingerprint(command: list[str]) -> str:
    """Of all that the library depends on: source, compiler, options, processor."""
    version = subprocess.run(
        [*command, "--version"], capture_output=True, check=True, timeout=_COMPILER_TIMEOUT_S
    )
    digest = hashlib.sha256(version.stdout)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update("\0".join((*command, *_OPTIONS, platform.machine())).encode())
    seen = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name = line.partition(":")[0].strip()
        if name in _PROCESSOR_FIELDS and name not in seen:
            seen.add(name)
            digest.update(line.encode())
    return digest.hexdigest()[:16]


def _compile(command: list[str], destination: Path) -> None:
    """Compile under another name and rename: no process meets half a library."""
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=destination.parent)
    os.close(descriptor)
    try:
        done = subprocess.run(
            [*command, *_OPTIONS, "-o", name, str(_MAIN)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMPILER_TIMEOUT_S,
        )
        if done.returncode:
            complaint = done.stderr.strip().splitlines()
            raise NativeUnavailableError(
                f"{command[0]} failed: {complaint[0] if complaint else done.returncode}"
            )
        os.replace(name, destination)
    finally:
        Path(name).unlink(missing_ok=True)


def _addresses_of_threads() -> tuple[int, int]:
    """Where PyTorch's own OpenMP runtime starts something on all threads, and counts them.

    A look-up in a library searches what that library was linked with, so this is the runtime that
    PyTorch uses, under whatever name: there are never two sets of threads.
    """
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    parallel, team_size = (
        ctypes.cast(function, ctypes.c_void_p).value or 0
        for function in (torch_library.GOMP_parallel, torch_library.omp_get_num_threads)
    )
    return parallel, team_size
