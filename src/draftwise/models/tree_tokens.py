"""The new tokens of a pass that form token trees.

The tokens of a tree have consecutive places in the cache, parents before their children, like a
chain. Their positions in the text follow from their depths, and each attends to the text before the
tree, to itself and to its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.trees import check_parents
from draftwise.kernels.native.structures import TREE_TOKEN
from draftwise.models.segment import Segment

# The ancestors of a token are the bits of one integer.
MAX_TREE_TOKENS = 64


class SegmentTree(NamedTuple):
    """The tree that the new tokens of a segment belong to.

    Attributes:
        root: place in the cache of the tree's first token. It may be before the segment, whose
            tokens then continue a tree.
        depths: ``[tokens]`` number of ancestors of each new token.
        ancestors: ``[tokens]`` bit i: the token attends to the token at ``root + i``. Each token
            attends to itself.
    """

    root: int
    depths: Sequence[int]
    ancestors: Sequence[int]


class TreePlaces(NamedTuple):
    """Places of the packed tokens of a pass in token trees, on the device.

    Attributes:
        positions: ``[tokens]`` int32, position of each token in its text.
        roots: ``[tokens]`` int32, place in the cache slot of the first token of its tree.
        ancestors: ``[tokens]`` int64, as in :class:`SegmentTree`; 0 for a token in no tree.
    """

    positions: Tensor
    roots: Tensor
    ancestors: Tensor


def whole_tree(start: int, parents: Sequence[int]) -> SegmentTree:
    """The tree of a segment that begins with its root.

    Args:
        start: place in the cache of the root.
        parents: ``[tokens - 1]`` parent of each token after the root, counted without the root; -1
            for the root.

    Raises:
        ValueError: there are more than ``MAX_TREE_TOKENS`` tokens, or a parent does not come before
            its child.
    """
    if len(parents) >= MAX_TREE_TOKENS:
        raise ValueError(
            f"a tree has at most {MAX_TREE_TOKENS} tokens with its root, got {len(parents) + 1}"
        )
    check_parents(parents)
    depths, ancestors = [0], [1]
    for node, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        ancestors.append(ancestors[parent + 1] | 1 << node + 1)
    return SegmentTree(start, depths, ancestors)


def tree_after(start: int, num_before: int, parents: Sequence[int]) -> SegmentTree | None:
    """The tree of a segment that begins with consecutive tokens, of which the last is the root.

    Args:
        start: place in the cache of the first token of the segment.
        num_before: number of consecutive tokens, at least 1.
        parents: ``[nodes]`` parent of each node after them, -1 for the root.

    Returns:
        The tree that all tokens of the segment form; ``None`` if they form a chain.

    Raises:
        ValueError: as :func:`whole_tree`.
    """
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return None
    before = num_before - 1
    return whole_tree(start, [*range(-1, before - 1), *(before + parent for parent in parents)])


def tree_tokens(
    segments: Sequence[Segment], trees: Sequence[SegmentTree | None]
) -> NDArray[np.void]:
    """``[tokens]`` of ``TREE_TOKEN``: the places of all packed tokens of a pass.

    ``ancestors`` is 0 for tokens of segments without a tree.

    Args:
        segments: new tokens of each request.
        trees: ``[segments]`` their trees; ``None`` for consecutive tokens.

    Raises:
        ValueError: a tree does not fit its segment.
    """
    found = np.zeros(sum(segment.num_tokens for segment in segments), dtype=TREE_TOKEN)
    first = 0
    for (_, start, count), tree in zip(segments, trees, strict=True):
        own = found[first : first + count]
        first += count
        if tree is None:
            own["root"], own["position"] = start, np.arange(start, start + count)
            continue
        last = start + count - 1 - tree.root
        if len(tree.depths) != count or len(tree.ancestors) != count:
            raise ValueError(f"a tree of {len(tree.depths)} tokens for a segment of {count}")
        if not (0 <= tree.root <= start and last < MAX_TREE_TOKENS):
            raise ValueError(f"a tree from {tree.root} on with new tokens from {start} on")
        own["root"] = tree.root
        own["position"] = tree.root + np.asarray(tree.depths)
        own["ancestors"] = np.asarray(tree.ancestors, dtype=np.uint64)
    return found


def hidden_in_tree(
    tokens: NDArray[np.void], start: int, first_key: int, device: torch.device
) -> Tensor:
    """``[tokens, keys]`` whether each token of a tree does not attend to each key.

    Limits of a layer's attention come in addition.

    Args:
        tokens: ``[tokens]`` of ``TREE_TOKEN``, the tokens of one segment.
        start: place in the cache of the first of them.
        first_key: place in the cache of the first key. The last key is that of the last token.
        device: device of the result.
    """
    keys = np.arange(first_key, start + len(tokens))
    bit = keys - int(tokens["root"][0])
    inside = np.clip(bit, 0, MAX_TREE_TOKENS - 1).astype(np.uint64)
    attends = (tokens["ancestors"][:, None] >> inside) & np.uint64(1)
    return torch.from_numpy((attends == 0) & (bit >= 0)).to(device)
