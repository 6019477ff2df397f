"""Loads the C++ kernels, which are compiled at first use.

Without a compiler, or anything else that it takes, there are none and PyTorch's own operations do
their work. :func:`kernel_in_use` says which of the two it is, and why.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch

from draftwise.models.native.compilation import NativeUnavailableError, compiled_library
from draftwise.models.native.structures import Threads, structure_sizes

# Of every function that the library exports.
_PREFIX = "draftwise_"
# Held while the library is loaded: functools.cache alone lets two threads load it at once.
_LOADING = threading.Lock()

_log = logging.getLogger(__name__)


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
        score: computes what a companion makes of a draft.
        lanes: numbers in a vector.
        multiplies_pairs: whether weights of bfloat16 are laid out in pairs.
        multiplies_tiles: whether the processor's matrix unit multiplies them, where a model's sizes
            are whole tiles.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take a library.

        Raises:
            NativeUnavailableError: it was compiled with other structures than Python's.
            AttributeError: it has not all functions.
        """
        _check_structures(library)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.attention = _function(library, "attention", None, pointer, pointer)
        self.attention_scratch = _function(library, "attention_scratch", number, *[number] * 6)
        self.decode = _function(library, "decode", None, pointer)
        self.decoder_memory = _function(library, "decoder_memory", number, pointer, *[number] * 3)
        self.accept = _function(library, "accept", None, pointer, pointer)
        self.distributions = _function(library, "distributions", None, pointer, pointer)
        self.count_exponents = _function(library, "count_exponents", None, pointer, number, pointer)
        self.compress = _function(
            library, "compress", None, pointer, number, pointer, pointer, pointer
        )
        self.draft = _function(library, "draft", None, pointer)
        self.score = _function(library, "score", None, pointer, pointer)
        self.lanes: int = _function(library, "lanes", number)()
        self.multiplies_pairs = bool(_function(library, "multiplies_pairs", number)())
        self.multiplies_tiles = bool(_function(library, "multiplies_tiles", number)())
        self._runtime = _addresses_of_threads()

    def threads(self, count: int | None = None) -> Threads:
        """So many of PyTorch's threads; ``None`` for as many as it uses."""
        return Threads(*self._runtime, torch.get_num_threads() if count is None else count)


class _StructureSize(ctypes.Structure):
    """``StructureSize`` of ``library.cpp``."""

    _fields_ = (("name", ctypes.c_char_p), ("size", ctypes.c_int64))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[_PREFIX + name]
    function.restype, function.argtypes = result, arguments
    return function


def _check_structures(library: ctypes.CDLL) -> None:
    """Compare the sizes of structures: kernels that read others would corrupt memory.

    Raises:
        NativeUnavailableError: names the first structure that differs.
    """
    entries = _function(library, "structure_sizes", ctypes.POINTER(_StructureSize))()
    compiled = {}
    for entry in entries:
        if entry.name is None:
            break
        compiled[entry.name.decode()] = entry.size
    expected = structure_sizes()
    for name in sorted(expected.keys() | compiled.keys()):
        ours, theirs = expected.get(name), compiled.get(name)
        if ours != theirs:
            raise NativeUnavailableError(
                f"structure {name} has {ours} bytes in Python and {theirs} in the compiled kernels"
            )


def native_library() -> NativeLibrary | None:
    """The kernels, compiled if need be, or ``None`` where there are none."""
    with _LOADING:
        return _load()[0]


def library_for(device: torch.device) -> NativeLibrary | None:
    """The kernels for tensors that lie there."""
    return native_library() if device.type == "cpu" else None


def why_unavailable() -> str:
    """Why there are no kernels; empty where there are."""
    with _LOADING:
        return _load()[1]


def kernel_in_use() -> str:
    """``"native"``, or ``"PyTorch"`` with the reason why there are no kernels."""
    reason = why_unavailable()
    return f"PyTorch ({reason})" if reason else "native"


@functools.cache
def _load() -> tuple[NativeLibrary | None, str]:
    """The kernels, or why there are none."""
    try:
        library = NativeLibrary(ctypes.CDLL(str(compiled_library())))
    except (NativeUnavailableError, OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.debug("models are computed by PyTorch: %s", error)
        return None, str(error)
    _log.debug("models are computed by the native kernels")
    return library, ""


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
