"""Distributions and what a companion thinks of a draft, by the kernels of ``sampling.h``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls
from draftwise.models.native.library import NativeLibrary
from draftwise.models.native.structures import DistributionCall, Sampling, ScoreCall

# Below so many numbers, waking the threads costs more than they save.
MIN_SHARED_NUMBERS = 8192


def sampling_parameters(controls: LogitControls) -> Sampling:
    """The parameters of requests whose bias and penalties have been applied."""
    return Sampling(
        controls.temperature.data_ptr(),
        *(
            None if values is None else values.data_ptr()
            for values in (controls.top_k, controls.top_p, controls.min_p)
        ),
    )


def order_memory(controls: LogitControls, num_threads: int, vocab: int) -> Tensor | None:
    """``[threads, vocab]`` int32, what filters sort in; ``None`` if nobody filters."""
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
    """What :func:`draftwise.core.sampling.probabilities` gives, or its ``soft_probabilities``.

    Args:
        library: the kernels.
        logits: ``[rows, vocab]`` float32, bias and penalties applied.
        controls: one entry per request.
        owner: ``[rows]`` int64, the request of each row.
        softens_greedy: greedy rows give their distribution at temperature 1, not one-hot.

    Returns:
        ``[rows, vocab]`` float32, each row summing to 1, or NaN throughout where logits are NaN.
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
    """What a companion thinks of each drafted token; zeros where there is none.

    Args:
        library: the kernels.
        logits: ``[rows, own_vocab]`` float32 of the companion, bias and penalties applied.
        controls: one entry per request.
        places: ``[rows, 2]`` int64, request and position of each row.
        tokens: ``[requests, width]`` int64 drafted tokens.
        q: ``[requests, >= width, vocab]`` float32, what the draft thinks; each request contiguous.

    Returns:
        Beliefs ``[requests, width, vocab]``, S and A ``[requests, width]``.
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
