"""Token trees by the kernels of ``tree_growth.h`` and ``tree_acceptance.h``."""

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
from draftwise.core.types import Plan, TreeProbs
from draftwise.models.native.library import NativeLibrary
from draftwise.models.native.sampling import (
    MIN_SHARED_NUMBERS,
    has_filters,
    sampling_parameters,
    sampling_scratch,
)
from draftwise.models.native.structures import ChildrenCall, NodeCall, TreeAcceptanceCall


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
    tree_probs: TreeProbs | None,
    uniforms: StepUniforms | None,
) -> NativePaths:
    """Verify the trees of a batch by the laws of :mod:`draftwise.core.trees`.

    Args:
        library: the kernels.
        logits: ``[rows, vocab]`` float32 logits with bias, penalties and masks applied. Each
            request has one row for its root and one for each verified node.
        controls: sampling parameters, one entry per request.
        plan: the verified trees.
        tree_probs: what the nodes of drawn trees were drawn from; ``None`` without such trees.
        uniforms: the random numbers of the step; ``None`` if all requests are greedy. ``accept``
            tests the nodes of drawn trees, and ``final`` draws the token after their paths. The
            tokens of other trees are drawn by ``final`` at the root and by ``following`` below.
    """
    batch, width, vocab = len(plan.lengths), plan.tokens.shape[1], logits.shape[1]
    lengths = np.array(plan.lengths, dtype=np.int64)
    first_rows = np.cumsum(lengths + 1) - lengths - 1
    tokens, parents = (
        _padded(rows, plan.lengths, width) for rows in (plan.host_tokens, plan.host_parents)
    )
    is_drawn = proposals = ids = None
    own_vocab = 0
    if tree_probs is not None:
        is_drawn = np.array([bool(rows) for rows in tree_probs.rows], dtype=np.uint8)
        addresses = [address for part in tree_probs.parts for address in _row_addresses(part)]
        places = [[addresses[row] if row >= 0 else 0 for row in own] for own in tree_probs.rows]
        drawn_lengths = [min(len(own), n) for own, n in zip(places, plan.lengths, strict=True)]
        proposals = _padded(places, drawn_lengths, width)
        ids = tree_probs.ids
        own_vocab = tree_probs.parts[0].shape[1]
    logits = logits.contiguous()
    numbers: list[Tensor] = []
    if uniforms is not None:
        numbers = [uniforms.accept, uniforms.final, uniforms.following]
        numbers = [each.contiguous() for each in numbers]
    nodes = np.empty((batch, width), dtype=np.int64)
    num_accepted, next_tokens = np.empty(batch, dtype=np.int64), np.empty(batch, dtype=np.int64)
    is_nan = np.empty(batch, dtype=np.bool_)
    threads = library.threads(None if batch > 1 and vocab >= MIN_SHARED_NUMBERS else 1)
    size = threads.count * library.tree_scratch(vocab, has_filters(controls))
    scratch = torch.empty(size, dtype=torch.uint8)
    call = TreeAcceptanceCall(
        logits.data_ptr(),
        *(array.ctypes.data for array in (first_rows, lengths, tokens, parents)),
        None if is_drawn is None else is_drawn.ctypes.data,
        None if proposals is None else proposals.ctypes.data,
        None if ids is None else ids.data_ptr(),
        *((each.data_ptr() for each in numbers) if numbers else (None,) * 3),
        scratch.data_ptr(),
        *(array.ctypes.data for array in (nodes, num_accepted, next_tokens, is_nan)),
        sampling_parameters(controls),
        batch,
        vocab,
        own_vocab,
        width,
        numbers[0].shape[1] if numbers else 0,
    )
    library.accept_trees(ctypes.byref(call), ctypes.byref(threads))
    paths = [own[:count] for own, count in zip(nodes.tolist(), num_accepted.tolist(), strict=True)]
    return NativePaths(paths, next_tokens.tolist(), is_nan.tolist())


class DescribedNodes(NamedTuple):
    """What the nodes of token trees get children from.

    Attributes:
        tokens: ``[rows, width]`` int64, the most likely tokens; for greedy requests.
        probs: ``[rows, width]`` float32, their probabilities; 0 for no token.
        entropy: ``[rows]`` float32 in nats, without filters; ``None`` if not wanted.
        q: ``[drawn rows, vocab]`` float32, the distributions that children of other requests' nodes
            are drawn from; zeros where the logits are NaN.
        largest: ``[rows]`` float32, the largest probability of ``q``; 0 for greedy requests.
        support: ``[rows]`` int64, number of tokens that have a probability there.
    """

    tokens: Tensor
    probs: Tensor
    entropy: Tensor | None
    q: Tensor
    largest: Tensor
    support: Tensor


def describe_nodes(
    library: NativeLibrary,
    logits: Tensor,
    controls: LogitControls,
    owner: Tensor,
    q_rows: Sequence[int],
    width: int,
    wants_entropy: bool,
) -> DescribedNodes:
    """Find what the nodes of token trees get children from.

    Args:
        library: the kernels.
        logits: ``[rows, vocab]`` of the draft model, without bias and penalties.
        controls: sampling parameters, one entry per request.
        owner: ``[rows]`` int64 request of each row.
        q_rows: ``[rows]`` the row of ``q`` in the result; -1 for greedy requests.
        width: number of likely tokens, at most ``vocab``.
        wants_entropy: whether to compute the entropy.
    """
    logits, owner = logits.float().contiguous(), owner.contiguous()
    num_rows, vocab = logits.shape
    tokens, probs = torch.empty(num_rows, width, dtype=torch.long), torch.empty(num_rows, width)
    entropy = torch.empty(num_rows) if wants_entropy else None
    largest, support = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.long)
    q = torch.empty(max(q_rows, default=-1) + 1, vocab)
    addresses = _row_addresses(q)
    pointers = (ctypes.c_void_p * num_rows)(
        *(addresses[row] if row >= 0 else None for row in q_rows)
    )
    threads = library.threads(None if logits.numel() >= MIN_SHARED_NUMBERS else 1)
    scratch = sampling_scratch(library, controls, threads.count, vocab)
    call = NodeCall(
        logits.data_ptr(),
        owner.data_ptr(),
        ctypes.addressof(pointers),
        tokens.data_ptr(),
        probs.data_ptr(),
        None if entropy is None else entropy.data_ptr(),
        largest.data_ptr(),
        support.data_ptr(),
        scratch.data_ptr(),
        sampling_parameters(controls),
        num_rows,
        vocab,
        width,
    )
    library.describe_nodes(ctypes.byref(call), ctypes.byref(threads))
    return DescribedNodes(tokens, probs, entropy, q, largest, support)


def draw_children(
    library: NativeLibrary, q: Tensor, rows: Sequence[int], uniforms: Tensor
) -> Tensor:
    """Compute :func:`draftwise.core.trees.draw_children` for some rows.

    Args:
        library: the kernels.
        q: ``[all rows, vocab]`` float32 distributions, contiguous.
        rows: ``[nodes]`` row of each node.
        uniforms: ``[nodes, children]`` float64 in [0, 1).
    """
    vocab, uniforms = q.shape[1], uniforms.contiguous()
    children = torch.empty(uniforms.shape, dtype=torch.long)
    addresses = _row_addresses(q)
    pointers = (ctypes.c_void_p * len(rows))(*(addresses[row] for row in rows))
    threads = library.threads(None if len(rows) * vocab >= MIN_SHARED_NUMBERS else 1)
    size = threads.count * library.sampling_scratch(vocab, False)
    scratch = torch.empty(size, dtype=torch.uint8)
    call = ChildrenCall(
        ctypes.addressof(pointers),
        uniforms.data_ptr(),
        children.data_ptr(),
        scratch.data_ptr(),
        len(rows),
        vocab,
        uniforms.shape[1],
    )
    library.draw_children(ctypes.byref(call), ctypes.byref(threads))
    return children


def _row_addresses(rows: Tensor) -> range:
    """The address of each row of a contiguous matrix."""
    start, size = rows.data_ptr(), rows.shape[1] * rows.element_size()
    return range(start, start + len(rows) * size, size)


def _padded(rows: Sequence[Sequence[int]], lengths: Sequence[int], width: int) -> NDArray[np.int64]:
    """``[rows, width]`` the first numbers of each row, and zeros."""
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for row, (numbers, length) in enumerate(zip(rows, lengths, strict=True)):
        padded[row, :length] = numbers[:length]
    return padded
