"""Token trees, and the two laws that verify them without changing the target's distribution.

A tree's root is the request's last token. Its nodes are drafted tokens, and a node's children are
alternatives for the token after it. Node *i* is verified with the target's distribution p after the
path to it. Both laws walk from the root towards a leaf:

- *Drawn by the target* (:func:`accept_drawn_path`): draw x from p at the node. If x is a child, go
  there; otherwise emit x. The emitted text has distribution p for every tree that is chosen before
  x is drawn, whatever its nodes are. The expected number of accepted tokens is the sum over the
  nodes of the probability of their paths under p.
- *Drawn by the draft* (:func:`accept_sampled_path`): the children of a node are drawn from the
  draft's distribution q without replacement, and tested in this order. A child x is accepted with
  probability min(1, p(x)/q(x)). Otherwise p becomes norm(max(p − q, 0)), and q loses x and is
  normalised again. After the last child, the token is drawn from what is left of p. This is
  recursive rejection sampling (SpecInfer, Miao et al. 2023, arXiv 2305.09781, for draws with
  replacement; Sequoia, Chen et al. 2024, arXiv 2402.12374, without). Whether a child is drafted or
  verified may depend on the path to its parent, on q and on its rank, and never on the token that
  was drawn.

A chain is a tree in which every node has one child. There, the second law is that of
:mod:`draftwise.core.rejection`.

Shapes: ``batch`` is the number of requests, ``nodes`` the largest number of nodes. Parents come
before their children, and children of one parent in the order in which they were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.rejection import sample

ROOT = -1


class AcceptedPath(NamedTuple):
    """The path that was accepted in each tree.

    Attributes:
        nodes: ``[batch, nodes]`` int64, indices of the accepted nodes from the root on; ``ROOT``
            after the last.
        num_accepted: ``[batch]`` int64, number of accepted nodes.
        next_tokens: ``[batch]`` int64, the token that follows the path.
    """

    nodes: Tensor
    num_accepted: Tensor
    next_tokens: Tensor


def check_parents(parents: Sequence[int]) -> None:
    """Check that the parents of one tree come before their children.

    Raises:
        ValueError: names the first node whose parent does not come before it.
    """
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(f"parents[{node}] must be between -1 and {node - 1}, got {parent}")


def accept_drawn_path(
    tokens: Tensor, parents: Tensor, lengths: Tensor, drawn: Tensor
) -> AcceptedPath:
    """Follow the tokens that were drawn from the target.

    Args:
        tokens: ``[batch, nodes]`` int64 drafted tokens.
        parents: ``[batch, nodes]`` int64 parents, -1 for the root.
        lengths: ``[batch]`` int64 number of verified nodes.
        drawn: ``[batch, nodes + 1]`` int64 token drawn from p at the root and at each node.
    """
    walk = _Walk(len(tokens), tokens.shape[1], tokens.device)
    for node in range(tokens.shape[1]):
        here = drawn.gather(1, walk.at.unsqueeze(1) + 1).squeeze(1)
        is_child = (parents[:, node] == walk.at) & (node < lengths)
        walk.go(node, is_child & (here == tokens[:, node]))
    return walk.end(drawn.gather(1, walk.at.unsqueeze(1) + 1).squeeze(1))


def accept_sampled_path(
    tokens: Tensor,
    parents: Tensor,
    lengths: Tensor,
    probs: Tensor,
    draft_probs: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    is_one_hot: Tensor | None = None,
) -> AcceptedPath:
    """Test children that were drawn from the draft without replacement.

    Args:
        tokens: ``[batch, nodes]`` int64 drafted tokens.
        parents: ``[batch, nodes]`` int64 parents, -1 for the root.
        lengths: ``[batch]`` int64 number of verified nodes.
        probs: ``[batch, nodes + 1, vocab]`` target distributions p at the root and at each node.
        draft_probs: ``[batch, nodes + 1, vocab]`` the distributions q from which the children of
            the root and of each node were drawn; not read at nodes without drawn children.
        accept_uniforms: ``[batch, nodes]`` in [0, 1), one for each node.
        final_uniforms: ``[batch]`` float64 in [0, 1).
        is_one_hot: ``[batch, nodes]`` bool, nodes that were proposed with certainty, such as copied
            tokens; ``None`` if there are none. They must be chosen before anything is drawn.
    """
    batch, rows = len(tokens), torch.arange(len(tokens), device=tokens.device)
    walk = _Walk(batch, tokens.shape[1], tokens.device)
    p, q = probs[:, 0].clone(), draft_probs[:, 0].clone()
    for node in range(tokens.shape[1]):
        tested = (parents[:, node] == walk.at) & (node < lengths)
        copied = torch.zeros_like(tested) if is_one_hot is None else is_one_hot[:, node]
        acceptance, left, own = child_acceptance(p, q, tokens[:, node], copied)
        accepted = tested & (accept_uniforms[:, node] < acceptance)
        rejected = (tested & ~accepted).unsqueeze(1)
        p, q = torch.where(rejected, left, p), torch.where(rejected, own, q)
        walk.go(node, accepted)
        moved = accepted.unsqueeze(1)
        p = torch.where(moved, probs[rows, node + 1], p)
        q = torch.where(moved, draft_probs[rows, node + 1], q)
    return walk.end(sample(p, final_uniforms))


def child_acceptance(
    p: Tensor, q: Tensor, child: Tensor, is_one_hot: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """P(a child is accepted), and p and q of the next one if it is rejected.

    Args:
        p: ``[batch, vocab]`` what is left of the target's distribution.
        q: ``[batch, vocab]`` distribution from which the child was drawn.
        child: ``[batch]`` int64 token.
        is_one_hot: ``[batch]`` whether the child was proposed with certainty instead of drawn.

    Returns:
        ``[batch]``, ``[batch, vocab]`` and ``[batch, vocab]``. What is left of q is zeros if it has
        no mass.
    """
    at = child.unsqueeze(1)
    proposed = torch.where(is_one_hot.unsqueeze(1), torch.zeros_like(q).scatter(1, at, 1.0), q)
    ratio = p.gather(1, at) / proposed.gather(1, at).clamp(min=torch.finfo(q.dtype).tiny)
    left = _normalized((p - proposed).clamp(min=0))
    # A residual without mass comes from rounding, as then p and the proposal are the same.
    left = torch.where(left.sum(dim=1, keepdim=True) > 0, left, p)
    remaining = torch.where(is_one_hot.unsqueeze(1), q, _normalized(q.scatter(1, at, 0.0)))
    return ratio.squeeze(1).clamp(max=1.0), left, remaining


def draw_children(q: Tensor, uniforms: Tensor) -> Tensor:
    """Draw children of one node without replacement.

    Args:
        q: ``[batch, vocab]`` the draft's distributions.
        uniforms: ``[batch, children]`` float64 in [0, 1).

    Returns:
        ``[batch, children]`` int64 tokens in the order in which they were drawn; -1 where q has no
        mass left.
    """
    found = torch.full(uniforms.shape, -1, dtype=torch.long, device=q.device)
    left = q.clone()
    for rank in range(uniforms.shape[1]):
        has_mass = left.sum(dim=1) > 0
        drawn = sample(left, uniforms[:, rank])
        found[:, rank] = torch.where(has_mass, drawn, found[:, rank])
        left.scatter_(1, drawn.unsqueeze(1), 0.0)
    return found


def follow_drawn_children(
    tokens: Sequence[int],
    parents: Sequence[int],
    probs: Callable[[int], Tensor],
    draft_probs: Callable[[int], Tensor | None],
    accept_uniforms: Sequence[float],
    final_uniform: float,
) -> tuple[list[int], int]:
    """Test the drawn children of one tree, as :func:`accept_sampled_path` does.

    Only the distributions at nodes that are reached are read.

    Args:
        tokens: ``[nodes]`` drafted tokens.
        parents: ``[nodes]`` parents, -1 for the root.
        probs: from a node, or the root, to the target's distribution p there, ``[vocab]``.
        draft_probs: from a node to the distribution q that it and its later siblings were drawn
            from; ``None`` for a node that was proposed with certainty. Such a node comes before its
            drawn siblings.
        accept_uniforms: ``[nodes]`` in [0, 1), one for each node.
        final_uniform: in [0, 1).

    Returns:
        The accepted nodes from the root on, and the token after them.
    """
    at, path = ROOT, list[int]()
    p, q = probs(ROOT).unsqueeze(0), None
    for node, token in enumerate(tokens):
        if parents[node] != at:
            continue
        if q is None:
            drawn_from = draft_probs(node)
            q = None if drawn_from is None else drawn_from.unsqueeze(0)
        child = torch.tensor([token], device=p.device)
        is_one_hot = torch.tensor([q is None], device=p.device)
        own = torch.zeros_like(p) if q is None else q
        acceptance, left, rest = child_acceptance(p, own, child, is_one_hot)
        if accept_uniforms[node] < float(acceptance):
            at, q = node, None
            path.append(node)
            p = probs(node).unsqueeze(0)
        else:
            p, q = left, None if q is None else rest
    final = torch.tensor([final_uniform], dtype=torch.float64, device=p.device)
    return path, int(sample(p, final))


class _Walk:
    """The accepted path of each tree so far.

    Attributes:
        at: ``[batch]`` the last accepted node; ``ROOT`` before the first.
    """

    def __init__(self, batch: int, nodes: int, device: torch.device) -> None:
        self.at = torch.full((batch,), ROOT, dtype=torch.long, device=device)
        self._count = torch.zeros(batch, dtype=torch.long, device=device)
        self._nodes = torch.full((batch, nodes), ROOT, dtype=torch.long, device=device)

    def go(self, node: int, accepted: Tensor) -> None:
        """Accept a node in some trees, ``[batch]`` bool."""
        self.at = torch.where(accepted, node, self.at)
        (rows,) = accepted.nonzero(as_tuple=True)
        self._nodes[rows, self._count[rows]] = node
        self._count += accepted

    def end(self, next_tokens: Tensor) -> AcceptedPath:
        """The result."""
        return AcceptedPath(self._nodes, self._count, next_tokens)


def _normalized(weights: Tensor) -> Tensor:
    """Rows divided by their sum; zeros where the sum is 0."""
    total = weights.sum(dim=1, keepdim=True)
    # In two steps, as a denormal sum has no finite reciprocal.
    scaled = weights / torch.where(total > 0, weights.amax(dim=1, keepdim=True), 1.0)
    return scaled / torch.where(total > 0, scaled.sum(dim=1, keepdim=True), 1.0)
