"""The compiled C++ kernels: those of the wheel, or compiled on this machine.

A wheel may have the kernels for several instruction sets. Otherwise, and if one of the last two
variables below is set, they are compiled, and the library is stored in the user's cache folder.

Environment variables:

- ``DRAFTWISE_NATIVE=0`` disables the kernels.
- ``CXX`` is the compiler, options included. The default is the first of ``c++``, ``g++`` and
  ``clang++`` that is installed.
- ``DRAFTWISE_NATIVE_FLAGS`` contains additional compiler options, such as ``-g`` or those of a
  sanitizer.

Each combination of sources, compiler, options and processor has its own library file.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftwise.kernels.native.instruction_sets import (
    FLOAT32_PRODUCTS,
    OPTIONS,
    SOURCES,
    compile_command,
    compiled_kernels,
)
from draftwise.zoo.bundled import cache_folder

NATIVE_VARIABLE = "DRAFTWISE_NATIVE"
FLAGS_VARIABLE = "DRAFTWISE_NATIVE_FLAGS"
COMPILER_VARIABLE = "CXX"

_COMPILERS = ("c++", "g++", "clang++")
_COMPILER_TIMEOUT_S = 600
# Fields of /proc/cpuinfo that determine the instructions of -march=native.
_PROCESSOR_FIELDS = ("model name", "flags", "Features", "CPU part")

_log = logging.getLogger(__name__)


class NativeUnavailableError(Exception):
    """The kernels are not available. :mod:`draftwise.kernels.native.library` catches this error."""


def compiled_library(sources: Path = SOURCES) -> Path:
    """Return the path of the shared library. Compile it if there is none yet.

    Of several processes and threads that call this at the same time, one compiles the library and
    the others wait.

    Args:
        sources: folder with ``library.cpp``, the headers that it includes, and ``exports.map``,
            the list of exported names.

    Raises:
        NativeUnavailableError: the kernels are disabled or cannot be compiled on this machine.
        OSError: the cache folder cannot be written.
        subprocess.SubprocessError: the compiler exceeds the time limit or does not print its
            version.
    """
    if os.environ.get(NATIVE_VARIABLE) == "0":
        raise NativeUnavailableError(f"{NATIVE_VARIABLE} is 0")
    if sys.platform != "linux":
        raise NativeUnavailableError(f"no native kernels for {sys.platform}")
    if not os.environ.get(COMPILER_VARIABLE) and not os.environ.get(FLAGS_VARIABLE):
        of_wheel = compiled_kernels(platform.machine(), _processor_fields())
        if of_wheel is not None:
            return of_wheel
    compiler, options = _compiler(), _options()
    folder = _own_folder(cache_folder() / "native")
    library = folder / f"kernels-{_fingerprint(compiler, options, sources)}.so"
    if not library.exists():
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile([*compiler, *options], sources, library)
    return library


def _compiler() -> list[str]:
    """The compiler and its options from ``CXX``."""
    configured = shlex.split(os.environ.get(COMPILER_VARIABLE, ""))
    found = next(filter(None, map(shutil.which, configured[:1] or _COMPILERS)), None)
    if found is None:
        raise NativeUnavailableError("no C++ compiler found")
    return [found, *configured[1:]]


def _options() -> list[str]:
    options = [*OPTIONS, "-march=native"]
    if _multiplies_in_float32():
        options.append(FLOAT32_PRODUCTS)
    return [*options, *shlex.split(os.environ.get(FLAGS_VARIABLE, ""))]


def _multiplies_in_float32() -> bool:
    """Whether products in float32 are faster than the dot products of AVX512-BF16."""
    fields = _processor_fields()
    flags = fields.get("flags", "").split()
    is_intel = fields.get("vendor_id") == "GenuineIntel"
    return is_intel and "avx512_bf16" in flags and "amx_bf16" not in flags


def _own_folder(folder: Path) -> Path:
    """Create a folder that no other user can write to, as its files are loaded as code."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & others:
        raise NativeUnavailableError(f"{folder} is not this user's alone")
    return folder


def _fingerprint(compiler: list[str], options: list[str], sources: Path) -> str:
    """A digest of the sources, the compiler, its options and the processor."""
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=True, timeout=_COMPILER_TIMEOUT_S
    )
    digest = hashlib.sha256(version.stdout)
    for source in sorted(sources.iterdir()):
        digest.update(source.read_bytes())
    digest.update("\0".join((*compiler, *options, platform.machine())).encode())
    fields = _processor_fields()
    digest.update("\0".join(fields.get(name, "") for name in _PROCESSOR_FIELDS).encode())
    return digest.hexdigest()[:16]


def _processor_fields() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock. The operating system releases it when the process ends in any way."""
    import fcntl  # does not exist on Windows

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems do not support locks. Several processes may then compile.
            _log.debug("cannot lock %s: %s", path, error)
        yield


def _compile(command: list[str], sources: Path, destination: Path) -> None:
    """Compile to a temporary file and rename it, so that no process loads an incomplete library."""
    # A library that is preloaded into Python, such as a sanitizer's, would slow the compiler down.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=destination.parent)
    os.close(descriptor)
    try:
        done = subprocess.run(
            compile_command(command, sources, Path(name)),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=environment,
            timeout=_COMPILER_TIMEOUT_S,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            errors = [line for line in lines if "error" in line]
            reason = next(iter([*errors, *lines]), done.returncode)
            raise NativeUnavailableError(f"{command[0]} failed: {reason}")
        os.replace(name, destination)
    finally:
        Path(name).unlink(missing_ok=True)
