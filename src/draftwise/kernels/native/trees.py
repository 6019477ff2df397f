"""Token trees by the kernels of ``trees.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.sampling import LogitControls
from draftwise.core.types import Plan
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.sampling import (
    MIN_SHARED_NUMBERS,
    sampling_parameters,
    sampling_scratch,
)
from draftwise.kernels.native.structures import NodeCall, TreeAcceptanceCall


class NativePaths(NamedTuple):
    """The accepted path of each tree.

    Attributes:
        nodes: ``[batch]`` accepted nodes of each tree from the root on.
        next_tokens: ``[batch]`` the token after each path.
        is_nan: ``[batch]`` whether logits on the path are NaN.
    """

    nodes: list[list[int]]
    next_tokens: list[int]
    is_nan: list[bool]


def accept_trees(
    library: NativeLibrary,
    logits: Tensor,
    controls: LogitControls,
    plan: Plan,
    uniforms: StepUniforms | None,
) -> NativePaths:
    """Verify the trees of a batch by the law of :mod:`draftwise.core.trees`.

    Args:
        library: the kernels.
        logits: ``[rows, vocab]`` float32 logits with bias, penalties and masks applied. Each
            request has one row for its root and one for each verified node.
        controls: sampling parameters, one entry per request.
        plan: the verified trees.
        uniforms: the random numbers of the step; ``None`` if all requests are greedy. ``final``
            draws the token at the root, and ``following`` those at the nodes.
    """
    batch, width, vocab = len(plan.lengths), plan.tokens.shape[1], logits.shape[1]
    lengths = np.array(plan.lengths, dtype=np.int64)
    first_rows = np.cumsum(lengths + 1) - lengths - 1
    tokens, parents = (
        _padded(rows, plan.lengths, width) for rows in (plan.host_tokens, plan.host_parents)
    )
    logits = logits.contiguous()
    numbers: list[Tensor] = []
    if uniforms is not None:
        numbers = [each.contiguous() for each in (uniforms.final, uniforms.following)]
    nodes = np.empty((batch, width), dtype=np.int64)
    num_accepted, next_tokens = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.int64)
    is_nan = np.empty(batch, dtype=np.bool_)
    threads = library.threads(None if batch > 1 and vocab >= MIN_SHARED_NUMBERS else 1)
    scratch = sampling_scratch(library, controls, threads.count, vocab)
    call = TreeAcceptanceCall(
        logits.data_ptr(),
        *(array.ctypes.data for array in (first_rows, lengths, tokens, parents)),
        *((each.data_ptr() for each in numbers) if numbers else (None,) * 2),
        scratch.data_ptr(),
        *(array.ctypes.data for array in (nodes, num_accepted, next_tokens, is_nan)),
        sampling_parameters(controls),
        batch,
        vocab,
        width,
        numbers[1].shape[1] if numbers else 0,
    )
    library.accept_trees(ctypes.byref(call), ctypes.byref(threads))
    paths = [own[:count] for own, count in zip(nodes.tolist(), num_accepted.tolist(), strict=True)]
    return NativePaths(paths, next_tokens.tolist(), is_nan.tolist())


class DescribedNodes(NamedTuple):
    """What the nodes of token trees get children from.

    Attributes:
        tokens: ``[rows, width]`` int64, the most likely tokens.
        probs: ``[rows, width]`` float32, their probabilities; 0 for no token.
        entropy: ``[rows]`` float32 in nats; ``None`` if not wanted.
    """

    tokens: Tensor
    probs: Tensor
    entropy: Tensor | None


def describe_nodes(
    library: NativeLibrary,
    logits: Tensor,
    controls: LogitControls,
    owner: Tensor,
    width: int,
    wants_entropy: bool,
) -> DescribedNodes:
    """Find what the nodes of token trees get children from.

    Args:
        library: the kernels.
        logits: ``[rows, vocab]`` of the draft model, without bias and penalties.
        controls: sampling parameters, one entry per request. Filters are not applied.
        owner: ``[rows]`` int64 request of each row.
        width: number of likely tokens, at most ``vocab``.
        wants_entropy: whether to compute the entropy.
    """
    logits, owner = logits.float().contiguous(), owner.contiguous()
    num_rows, vocab = logits.shape
    tokens, probs = torch.empty(num_rows, width, dtype=torch.long), torch.empty(num_rows, width)
    entropy = torch.empty(num_rows) if wants_entropy else None
    threads = library.threads(None if logits.numel() >= MIN_SHARED_NUMBERS else 1)
    scratch = sampling_scratch(library, controls, threads.count, vocab)
    call = NodeCall(
        logits.data_ptr(),
        owner.data_ptr(),
        tokens.data_ptr(),
        probs.data_ptr(),
        None if entropy is None else entropy.data_ptr(),
        scratch.data_ptr(),
        sampling_parameters(controls),
        num_rows,
        vocab,
        width,
    )
    library.describe_nodes(ctypes.byref(call), ctypes.byref(threads))
    return DescribedNodes(tokens, probs, entropy)


def _padded(rows: Sequence[Sequence[int]], lengths: Sequence[int], width: int) -> NDArray[np.int64]:
    """``[rows, width]`` the first numbers of each row, and zeros."""
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for row, (numbers, length) in enumerate(zip(rows, lengths, strict=True)):
        padded[row, :length] = numbers[:length]
    return padded
