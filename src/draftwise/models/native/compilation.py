"""Compiles the C++ kernels on this machine and keeps the result in the user's cache folder.

The environment decides how:

- ``DRAFTWISE_NATIVE=0`` switches the kernels off.
- ``CXX`` names the compiler, options included; by default the first of ``c++``, ``g++`` and
  ``clang++`` that is installed.
- ``DRAFTWISE_NATIVE_FLAGS`` holds further compiler options, such as ``-g`` or those of a sanitizer.

Other sources, another compiler, other options or another processor give another library, so all of
them can lie side by side.
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

from draftwise.zoo.registry import cache_folder

NATIVE_VARIABLE = "DRAFTWISE_NATIVE"
FLAGS_VARIABLE = "DRAFTWISE_NATIVE_FLAGS"
SOURCES = Path(__file__).with_name("source")

_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"),
)
_COMPILER_TIMEOUT_S = 600
# The fields of /proc/cpuinfo that decide which instructions -march=native means.
_PROCESSOR_FIELDS = ("model name", "flags", "Features", "CPU part")

_log = logging.getLogger(__name__)


class NativeUnavailableError(Exception):
    """Why there are no kernels. :mod:`draftwise.models.native.library` catches it."""


def compiled_library(sources: Path = SOURCES) -> Path:
    """The shared library, compiled unless the cache folder has it.

    Processes and threads that ask for it at the same time compile it once: one compiles and the
    others wait.

    Args:
        sources: folder with ``library.cpp``, all that it includes, and ``exports.map``, which
            lists what it exports.

    Raises:
        NativeUnavailableError: kernels are switched off, or cannot be compiled here.
        OSError: the cache folder cannot be written.
        subprocess.SubprocessError: the compiler does not end, or does not tell its version.
    """
    if os.environ.get(NATIVE_VARIABLE) == "0":
        raise NativeUnavailableError(f"{NATIVE_VARIABLE} is 0")
    if sys.platform != "linux":
        raise NativeUnavailableError(f"no native kernels for {sys.platform}")
    compiler, options = _compiler(), _options()
    folder = _own_folder(cache_folder() / "native")
    library = folder / f"kernels-{_fingerprint(compiler, options, sources)}.so"
    if not library.exists():
        with _locked(folder / "compile.lock"):
            if not library.exists():
                _compile([*compiler, *options], sources, library)
    return library


def _compiler() -> list[str]:
    """Start of the command line that compiles C++."""
    configured = shlex.split(os.environ.get("CXX", ""))
    found = next(filter(None, map(shutil.which, configured[:1] or _COMPILERS)), None)
    if found is None:
        raise NativeUnavailableError("no C++ compiler found")
    return [found, *configured[1:]]


def _options() -> list[str]:
    return [*_OPTIONS, *shlex.split(os.environ.get(FLAGS_VARIABLE, ""))]


def _own_folder(folder: Path) -> Path:
    """Make a folder that nobody else can write to: what lies there is loaded as code."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & others:
        raise NativeUnavailableError(f"{folder} is not this user's alone")
    return folder


def _fingerprint(compiler: list[str], options: list[str], sources: Path) -> str:
    """A digest of all that the library depends on: sources, compiler, options, processor."""
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=True, timeout=_COMPILER_TIMEOUT_S
    )
    digest = hashlib.sha256(version.stdout)
    for source in sorted(sources.iterdir()):
        digest.update(source.read_bytes())
    digest.update("\0".join((*compiler, *options, platform.machine())).encode())
    seen = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name = line.partition(":")[0].strip()
        if name in _PROCESSOR_FIELDS and name not in seen:
            seen.add(name)
            digest.update(line.encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file. The system gives the lock back when its process ends, however it ends."""
    import fcntl  # does not exist on Windows

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Two compilers then do the same work.
            _log.debug("cannot lock %s: %s", path, error)
        yield


def _compile(command: list[str], sources: Path, destination: Path) -> None:
    """Compile under another name and rename, so that no process loads half a library."""
    exports = ["-Xlinker", f"--version-script={sources / 'exports.map'}"]
    # What is loaded into Python, such as a sanitizer's runtime, would slow the compiler down.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=destination.parent)
    os.close(descriptor)
    try:
        done = subprocess.run(
            [*command, *exports, "-o", name, str(sources / "library.cpp")],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=environment,
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
