"""Loading of the C++ kernels, which are compiled at first use.

If the kernels are not available, for example without a compiler, PyTorch's operations are used
instead. :func:`kernel_in_use` returns which of the two is used, and the reason.
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

from draftwise.kernels.native.compilation import NativeUnavailableError, compiled_library
from draftwise.kernels.native.structures import Threads, structure_sizes

# Prefix of all exported functions.
_PREFIX = "draftwise_"
# Held while the library is loaded, as functools.cache alone would let two threads load it at once.
_LOADING = threading.Lock()

_log = logging.getLogger(__name__)


class NativeLibrary:
    """The compiled functions; see ``library.cpp``.

    Attributes:
        attention: attention of one layer.
        attention_scratch: floats of scratch memory that ``attention`` needs per thread.
        decode: forward pass of a Llama.
        decoder_memory: bytes of scratch memory that ``decode`` needs.
        accept: the acceptance law.
        accept_trees: the acceptance law of token trees.
        count_exponents: number of occurrences of each exponent in bfloat16 numbers.
        compress: lossless compression of bfloat16 to 12 bits.
        convolve: a causal convolution of a pass.
        continuations: continuations of texts after earlier occurrences of their last tokens.
        describe_nodes: likely tokens at the nodes of token trees.
        distributions: softmax with temperature and filters.
        draft: drafting of several tokens with a draft model.
        expand_rows: expands rows of a GGUF file's blocks to float32.
        greedy: the largest logit of each row.
        index_chunk: adds a part of a corpus to its indices.
        learn_matches: learning of the acceptance of continuations.
        multiply_packed: multiplies rows with a packed weight.
        pack_blocks: packs rows of a GGUF file's blocks.
        pack_integers: packs rows of integers with scales.
        packed_memory: bytes of scratch memory that ``multiply_packed`` needs.
        recur: tokens of a layer with a recurrent state.
        sampling_scratch: bytes of scratch memory per thread for sampling from logits.
        score: a companion's scores of a draft.
        tile_bytes: bytes of a tile of a packed weight.
        uniforms: the random numbers of a step.
        lanes: number of float32 lanes of a vector.
        multiplies_pairs: whether weights of bfloat16 are packed in pairs.
        multiplies_tiles: whether the matrix unit multiplies weights of bfloat16 whose number of
            inputs is a multiple of a tile's.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap a loaded library.

        Args:
            library: the loaded shared library.

        Raises:
            NativeUnavailableError: the size of a structure differs from Python's.
            AttributeError: a function is missing.
        """
        _check_structures(library)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.attention = _function(library, "attention", None, pointer, pointer)
        self.attention_scratch = _function(library, "attention_scratch", number, *[number] * 6)
        self.decode = _function(library, "decode", None, pointer)
        self.decoder_memory = _function(library, "decoder_memory", number, pointer, *[number] * 3)
        self.accept = _function(library, "accept", None, pointer, pointer)
        self.accept_trees = _function(library, "accept_trees", None, pointer, pointer)
        self.describe_nodes = _function(library, "describe_nodes", None, pointer, pointer)
        self.distributions = _function(library, "distributions", None, pointer, pointer)
        self.greedy = _function(library, "greedy", None, pointer, pointer)
        self.sampling_scratch = _function(library, "sampling_scratch", number, number, number)
        self.count_exponents = _function(library, "count_exponents", None, pointer, number, pointer)
        self.compress = _function(
            library, "compress", None, pointer, number, pointer, pointer, pointer
        )
        self.continuations = _function(library, "continuations", None, pointer)
        self.index_chunk = _function(library, "index_chunk", None, pointer, *[number] * 3)
        self.learn_matches = _function(library, "learn_matches", None, *[pointer] * 3)
        self.draft = _function(library, "draft", None, pointer)
        self.score = _function(library, "score", None, pointer, pointer)
        self.tile_bytes = _function(library, "tile_bytes", number, pointer, number)
        self.pack_blocks = _function(library, "pack_blocks", None, pointer, pointer)
        self.pack_integers = _function(library, "pack_integers", None, pointer, pointer)
        self.expand_rows = _function(library, "expand_rows", None, pointer, pointer)
        self.packed_memory = _function(library, "packed_memory", number, *[number] * 3)
        self.multiply_packed = _function(
            library,
            "multiply_packed",
            None,
            pointer,
            *(number, number, pointer, number),
            *(pointer, pointer, pointer),
        )
        self.convolve = _function(library, "convolve", None, pointer, pointer)
        self.recur = _function(library, "recur", None, pointer, pointer)
        self.uniforms = _function(
            library, "uniforms", None, pointer, pointer, number, number, pointer, pointer
        )
        self.lanes: int = _function(library, "lanes", number)()
        self.multiplies_pairs = bool(_function(library, "multiplies_pairs", number)())
        self.multiplies_tiles = bool(_function(library, "multiplies_tiles", number)())
        self._runtime = _addresses_of_threads()

    def threads(self, count: int | None = None) -> Threads:
        """A team of ``count`` of PyTorch's threads; ``None`` for all that PyTorch uses."""
        return Threads(*self._runtime, torch.get_num_threads() if count is None else count)


class _StructureSize(ctypes.Structure):
    """``StructureSize`` of ``library.cpp``."""

    _fields_ = (("name", ctypes.c_char_p), ("size", ctypes.c_int64))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[_PREFIX + name]
    function.restype, function.argtypes = result, arguments
    return function


def _check_structures(library: ctypes.CDLL) -> None:
    """Check that structures have the same size in both languages.

    Otherwise the kernels would corrupt memory.

    Raises:
        NativeUnavailableError: a size differs. The message names the first such structure.
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
    """The kernels, compiled at first use; ``None`` if they are not available."""
    with _LOADING:
        return _load()[0]


def library_for(device: torch.device) -> NativeLibrary | None:
    """The kernels for tensors on a device; ``None`` if they are not available."""
    return native_library() if device.type == "cpu" else None


def why_unavailable() -> str:
    """The reason why the kernels are not available; empty if they are."""
    with _LOADING:
        return _load()[1]


def kernel_in_use() -> str:
    """``"native"``, or ``"PyTorch"`` with the reason why the kernels are not available."""
    reason = why_unavailable()
    return f"PyTorch ({reason})" if reason else "native"


@functools.cache
def _load() -> tuple[NativeLibrary | None, str]:
    """The kernels, or the reason why they are not available."""
    try:
        library = NativeLibrary(ctypes.CDLL(str(compiled_library())))
    except (NativeUnavailableError, OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.debug("models are computed by PyTorch: %s", error)
        return None, str(error)
    _log.debug("models are computed by the native kernels")
    return library, ""


def _addresses_of_threads() -> tuple[int, int]:
    """Addresses of ``GOMP_parallel`` and ``omp_get_num_threads`` in PyTorch's OpenMP runtime.

    A symbol look-up in a library also searches the libraries that it was linked with. This
    therefore finds the runtime that PyTorch uses, independently of its file name, and no second
    thread pool is created.
    """
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    parallel, team_size = (
        ctypes.cast(function, ctypes.c_void_p).value or 0
        for function in (torch_library.GOMP_parallel, torch_library.omp_get_num_threads)
    )
    return parallel, team_size
