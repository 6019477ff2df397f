"""Distributions, and a companion's scores of a draft, by the kernels of ``sampling.h``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls
from draftwise.models.native.library import NativeLibrary
from draftwise.models.native.structures import DistributionCall, Sampling, ScoreCall

# Minimum number of logits for more than one thread. Below it, waking the threads takes longer than
# the time that they save.
MIN_SHARED_NUMBERS = 8192


def sampling_parameters(controls: LogitControls) -> Sampling:
    """The structure of the sampling parameters, without bias and penalties."""
    return Sampling(
        controls.temperature.data_ptr(),
        *(
            None if values is None else values.data_ptr()
            for values in (controls.top_k, controls.top_p, controls.min_p)
        ),
    )


def order_memory(controls: LogitControls, num_threads: int, vocab: int) -> Tensor | None:
    """``[threads, vocab]`` int32 scratch memory of the filters; ``None`` without filters."""
    if controls.top_k is None and controls.top_p is None:
        return None
    return torch.empty(num_threads, vocab, dtype=torch.int32)


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
    order = order_memory(controls, threads.count, vocab)
    call = DistributionCall(
        logits.data_ptr(),
        owner.data_ptr(),
        p.data_ptr(),
        None if order is None else order.data_ptr(),
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
    order = order_memory(controls, threads.count, vocab)
    call = ScoreCall(
        logits.data_ptr(),
        places.data_ptr(),
        tokens.data_ptr(),
        q.data_ptr(),
        c.data_ptr(),
        overlap.data_ptr(),
        agreement.data_ptr(),
        None if order is None else order.data_ptr(),
        sampling_parameters(controls),
        len(logits),
        logits.shape[1],
        vocab,
        width,
        q.stride(0),
    )
    library.score(ctypes.byref(call), ctypes.byref(threads))
    return c, overlap, agreement
