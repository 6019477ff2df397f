"""Distributions, greedy tokens and a companion's scores, by the kernels of ``sampling.h``.

The random numbers of a step come from the kernel of ``uniforms.h``.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwise.core import random
from draftwise.core.random import StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.kernels.native.library import NativeLibrary, native_library
from draftwise.kernels.native.structures import (
    DistributionCall,
    GreedyCall,
    Penalties,
    Sampling,
    ScoreCall,
)

# Minimum number of logits for more than one thread. Below it, waking the threads takes longer than
# the time that they save.
MIN_SHARED_NUMBERS = 8192


def sampling_parameters(controls: LogitControls) -> Sampling:
    """The structure of temperature and filters."""
    return Sampling(
        controls.temperature.data_ptr(),
        *(
            None if values is None else values.data_ptr()
            for values in (controls.top_k, controls.top_p, controls.min_p)
        ),
    )


def has_filters(controls: LogitControls) -> bool:
    """Whether any request may have a filter."""
    filters = controls.top_k, controls.top_p, controls.min_p
    return any(values is not None for values in filters)


class PenaltyMemory:
    """The structure of bias and penalties, with memory in which a kernel counts further tokens.

    Attributes:
        structure: refers to tensors that this object keeps.
    """

    def __init__(
        self, controls: LogitControls, token_history: TokenHistory | None, num_more: int
    ) -> None:
        """Set up.

        Args:
            controls: one entry per request.
            token_history: one entry per request; needed if penalties are used.
            num_more: maximum number of tokens that the kernel counts for a request.
        """
        self.structure = structure = Penalties()
        self._tensors: list[Tensor] = []
        if controls.bias_tokens is not None:
            assert controls.bias_values is not None
            structure.bias_tokens = self._address(controls.bias_tokens)
            structure.bias_values = self._address(controls.bias_values)
            structure.num_biases = controls.bias_tokens.shape[1]
        if not controls.uses_token_history:
            return
        if token_history is None:
            raise ValueError("penalties need the token history")
        for name in ("repetition", "presence", "frequency"):
            values = getattr(controls, f"{name}_penalty")
            setattr(structure, name, None if values is None else self._address(values))
        num_requests, num_seen = token_history.tokens.shape
        structure.tokens = self._address(pad(token_history.tokens, (0, num_more)))
        structure.counts = self._address(pad(token_history.counts, (0, num_more)))
        structure.num_tokens = self._address(torch.full((num_requests,), num_seen))
        structure.capacity = num_seen + num_more

    def _address(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.contiguous())
        return self._tensors[-1].data_ptr()


def sampling_scratch(
    library: NativeLibrary, controls: LogitControls, num_threads: int, vocab: int
) -> Tensor:
    """Scratch memory of all threads for sampling from rows of ``vocab`` logits."""
    size = num_threads * library.sampling_scratch(vocab, has_filters(controls))
    return torch.empty(size, dtype=torch.uint8)


def greedy_tokens(library: NativeLibrary, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row.

    Args:
        library: the compiled kernels.
        logits: ``[rows, vocab]`` float32 logits with bias and penalties applied.

    Returns:
        ``[rows]`` int64, the first index of the largest logit, and ``[rows]`` bool, whether a logit
        is NaN.
    """
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.long)
    is_nan = torch.empty(num_rows, dtype=torch.bool)
    threads = library.threads(None if logits.numel() >= MIN_SHARED_NUMBERS else 1)
    call = GreedyCall(logits.data_ptr(), tokens.data_ptr(), is_nan.data_ptr(), num_rows, vocab)
    library.greedy(ctypes.byref(call), ctypes.byref(threads))
    return tokens, is_nan


def distributions(
    library: NativeLibrary,
    logits: Tensor,
    controls: LogitControls,
    owner: Tensor,
    softens_greedy: bool = False,
) -> Tensor:
    """Compute ``probabilities`` or ``soft_probabilities`` of :mod:`draftwise.core.sampling`.

    Args:
        library: the compiled kernels.
        logits: ``[rows, vocab]`` float32 logits with bias and penalties applied.
        controls: sampling parameters, one entry per request.
        owner: ``[rows]`` int64 request of each row.
        softens_greedy: whether greedy rows are computed at temperature 1 instead of one-hot.

    Returns:
        ``[rows, vocab]`` float32. Each row sums to 1, or contains only NaN if its logits are NaN.
    """
    logits, owner = logits.contiguous(), owner.contiguous()
    num_rows, vocab = logits.shape
    p = torch.empty_like(logits)
    threads = library.threads(None if p.numel() >= MIN_SHARED_NUMBERS else 1)
    scratch = sampling_scratch(library, controls, threads.count, vocab)
    call = DistributionCall(
        logits.data_ptr(),
        owner.data_ptr(),
        p.data_ptr(),
        scratch.data_ptr(),
        sampling_parameters(controls),
        num_rows,
        vocab,
        softens_greedy,
    )
    library.distributions(ctypes.byref(call), ctypes.byref(threads))
    return p


def score_draft(
    library: NativeLibrary,
    logits: Tensor,
    controls: LogitControls,
    places: Tensor,
    tokens: Tensor,
    q: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a companion's scores of drafted tokens.

    Args:
        library: the compiled kernels.
        logits: ``[rows, own_vocab]`` float32 logits of the companion with bias and penalties
            applied.
        controls: sampling parameters, one entry per request.
        places: ``[rows, 2]`` int64 request and position of each row.
        tokens: ``[requests, width]`` int64 drafted tokens.
        q: ``[requests, >= width, vocab]`` float32 distributions of the draft, copied unless each
            request's part is contiguous.

    Returns:
        The companion's distributions ``[requests, width, vocab]``, and S and A
        ``[requests, width]``. Positions without a drafted token are 0.
    """
    num_requests, width = tokens.shape
    vocab = q.shape[2]
    c = torch.zeros(num_requests, width, vocab)
    overlap, agreement = torch.zeros(num_requests, width), torch.zeros(num_requests, width)
    logits, places, tokens = logits.contiguous(), places.contiguous(), tokens.contiguous()
    if q.stride()[1:] != (vocab, 1):
        q = q.contiguous()
    threads = library.threads(None if logits.numel() >= MIN_SHARED_NUMBERS else 1)
    scratch = sampling_scratch(library, controls, threads.count, vocab)
    call = ScoreCall(
        logits.data_ptr(),
        places.data_ptr(),
        tokens.data_ptr(),
        q.data_ptr(),
        c.data_ptr(),
        overlap.data_ptr(),
        agreement.data_ptr(),
        scratch.data_ptr(),
        sampling_parameters(controls),
        len(logits),
        logits.shape[1],
        vocab,
        width,
        q.stride(0),
    )
    library.score(ctypes.byref(call), ctypes.byref(threads))
    return c, overlap, agreement


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
