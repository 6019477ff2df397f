"""The random numbers of a step, by the kernel of ``uniforms.h``."""

from __future__ import annotations

import numpy as np

from draftwise.core import random
from draftwise.core.random import StepUniforms
from draftwise.kernels.native.library import native_library


def step_uniforms(seeds: list[int], positions: list[int], num_tokens: int) -> StepUniforms:
    """Compute :func:`draftwise.core.random.step_uniforms`, with the same bits.

    Args:
        seeds: ``[batch]`` 64-bit seeds, one per request.
        positions: ``[batch]`` number of tokens (prompt and output) of each request.
        num_tokens: the longest draft of the step.
    """
    library = native_library()
    if library is None:
        return random.step_uniforms(seeds, positions, num_tokens)
    keys = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    places = np.array(positions, dtype=np.int64)
    shape = (len(seeds), 3 * num_tokens + 1)
    drawing, accepting = np.empty(shape), np.empty(shape, dtype=np.float32)
    library.uniforms(
        *(keys.ctypes.data, places.ctypes.data, len(seeds), num_tokens),
        *(drawing.ctypes.data, accepting.ctypes.data),
    )
    return StepUniforms.from_streams(drawing, accepting)
