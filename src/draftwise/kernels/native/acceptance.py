"""The acceptance law, computed by the kernels of ``acceptance.h``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.core.rejection import Accepted
from draftwise.core.sampling import LogitControls
from draftwise.core.types import Plan
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.sampling import (
    MIN_SHARED_NUMBERS,
    sampling_parameters,
    sampling_scratch,
)
from draftwise.kernels.native.structures import AcceptanceCall, Softmax


def accept(
    library: NativeLibrary,
    logits: Tensor,
    controls: LogitControls,
    plan: Plan,
    lengths: Tensor,
    owner: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    following_uniforms: Tensor,
    lenience: Tensor | None,
    by_block: bool,
    one_hot: Tensor | None = None,
) -> tuple[Tensor, Accepted]:
    """Compute :func:`draftwise.core.rejection.accept` from the target's logits.

    Args:
        library: the kernels.
        logits: ``[rows, vocab]`` float32 logits with bias and penalties applied, request by
            request. Each request has one row per verified position and one after the last.
        controls: sampling parameters, one entry per request.
        plan: tokens to verify and their proposal distributions.
        lengths: ``[batch]`` int64 number of verified tokens of each request.
        owner: ``[rows]`` int64 request of each row.
        accept_uniforms: ``[batch, >= width]`` float32 random numbers that decide acceptance.
        final_uniforms: ``[batch]`` float64 random numbers that sample the next token.
        following_uniforms: ``[batch, >= width]`` float64, ``final_uniforms`` of steps that would
            begin after each drafted token; for one-hot proposals.
        lenience: ``[batch]`` float32 lenience of each request; ``None`` for 1.
        by_block: whether to verify by block instead of token by token.
        one_hot: ``[batch]`` bool, the requests whose proposals are all one-hot; ``None`` if that
            holds for all requests without proposals, and for none with them.

    Returns:
        ``[rows]`` bool, whether a row of logits is NaN, and the result of the acceptance law.
    """
    tokens, proposals = plan.tokens, plan.proposals
    batch, width = tokens.shape
    vocab = logits.shape[1]
    ends = (lengths + 1).cumsum(dim=0)
    first_rows = ends - lengths - 1
    logits, lengths, owner = logits.contiguous(), lengths.contiguous(), owner.contiguous()
    accept_uniforms, final_uniforms = accept_uniforms.contiguous(), final_uniforms.contiguous()
    following_uniforms = following_uniforms.contiguous()
    if proposals is None:
        one_hot = torch.ones(batch, dtype=torch.bool)
    drawn = None if one_hot is None else torch.empty(len(logits), dtype=torch.long)
    if width and tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    if proposals is not None and proposals.stride()[1:] != (vocab, 1):
        proposals = proposals.contiguous()
    rows = (Softmax * len(logits))()
    is_nan = torch.empty(len(logits), dtype=torch.bool)
    num_accepted = torch.empty(batch, dtype=torch.long)
    next_tokens = torch.empty(batch, dtype=torch.long)
    acceptance, prefix_acceptance_prob = torch.zeros(batch, width), torch.zeros(batch, width)
    threads = library.threads(None if logits.numel() >= MIN_SHARED_NUMBERS else 1)
    scratch = sampling_scratch(library, controls, threads.count, vocab)
    call = AcceptanceCall(
        logits.data_ptr(),
        first_rows.data_ptr(),
        lengths.data_ptr(),
        tokens.data_ptr(),
        None if proposals is None else proposals.data_ptr(),
        accept_uniforms.data_ptr(),
        final_uniforms.data_ptr(),
        None if lenience is None else lenience.data_ptr(),
        owner.data_ptr(),
        ctypes.addressof(rows),
        scratch.data_ptr(),
        num_accepted.data_ptr(),
        next_tokens.data_ptr(),
        acceptance.data_ptr(),
        prefix_acceptance_prob.data_ptr(),
        is_nan.data_ptr(),
        following_uniforms.data_ptr(),
        None if drawn is None else drawn.data_ptr(),
        None if one_hot is None else one_hot.data_ptr(),
        sampling_parameters(controls),
        batch,
        len(logits),
        vocab,
        width,
        tokens.stride(0),
        0 if proposals is None else proposals.stride(0),
        accept_uniforms.shape[1],
        following_uniforms.shape[1],
        by_block,
    )
    library.accept(ctypes.byref(call), ctypes.byref(threads))
    return is_nan, Accepted(num_accepted, next_tokens, acceptance, prefix_acceptance_prob)
