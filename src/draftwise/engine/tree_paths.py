"""The paths of token trees: from the root to each node, and the ones that were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from draftwise.core.trees import ROOT
from draftwise.core.types import Plan


class PathRows(NamedTuple):
    """The places in a batch of trees at which the target's distribution is known.

    Rows are in the order of the target's logits: each request's root, and then its verified nodes.

    Attributes:
        owners: ``[rows]`` request of each row.
        paths: ``[rows]`` the drafted tokens from the root to each row.
    """

    owners: list[int]
    paths: list[list[int]]


def path_rows(plan: Plan) -> PathRows:
    """The rows of a plan of trees."""
    owners: list[int] = []
    paths: list[list[int]] = []
    rows = zip(plan.host_tokens, plan.host_parents, plan.lengths, strict=True)
    for request, (tokens, parents, length) in enumerate(rows):
        own: list[list[int]] = [[]]
        for token, parent in zip(tokens[:length], parents, strict=False):
            own.append([*own[parent + 1], token])
        owners += [request] * len(own)
        paths += own
    return PathRows(owners, paths)


def accepted_nodes(plan: Plan, drawn: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Follow the tokens that were drawn from the target; see :mod:`draftwise.core.trees`.

    This is :func:`draftwise.core.trees.accept_drawn_path` for packed rows.

    Args:
        plan: the verified trees.
        drawn: ``[rows]`` the token drawn at each row of :func:`path_rows`.

    Returns:
        ``[batch]`` accepted nodes of each request from the root on, and the tokens after them.
    """
    nodes: list[list[int]] = []
    next_tokens: list[int] = []
    first = 0
    rows = zip(plan.host_tokens, plan.host_parents, plan.lengths, strict=True)
    for tokens, parents, length in rows:
        at, own = ROOT, []
        for node in range(length):
            if parents[node] == at and tokens[node] == drawn[first + at + 1]:
                at = node
                own.append(node)
        nodes.append(own)
        next_tokens.append(drawn[first + at + 1])
        first += length + 1
    return nodes, next_tokens


def known_nodes(
    tokens: Sequence[int], parents: Sequence[int], gained: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """The nodes whose parents a request's new tokens go through, and whether they do too.

    Args:
        tokens: ``[nodes]`` of the drafted tree.
        parents: ``[nodes]`` parents, -1 for the root.
        gained: the tokens that the request gained.
    """
    known: list[int] = []
    accepted: list[bool] = []
    at = ROOT
    for token in gained:
        children = [node for node, parent in enumerate(parents) if parent == at]
        right = [tokens[node] == token for node in children]
        known += children
        accepted += right
        if not any(right):
            break
        at = children[right.index(True)]
    return known, accepted


def as_chains(plan: Plan, nodes: Sequence[Sequence[int]]) -> Plan:
    """A plan with only the accepted path of each tree.

    Args:
        plan: the verified trees.
        nodes: ``[batch]`` accepted nodes of each request.
    """
    lengths = tuple(len(own) for own in nodes)
    tokens = torch.zeros(len(nodes), max(lengths, default=0), dtype=torch.long)
    for row, (own, drafted) in enumerate(zip(nodes, plan.host_tokens, strict=True)):
        tokens[row, : len(own)] = torch.tensor([drafted[node] for node in own], dtype=torch.long)
    tokens = tokens.to(plan.tokens.device)
    # A follower that read the tree's tokens has them in another order, so it keeps none of them.
    num_own = (0,) * len(nodes)
    return replace(plan, tokens=tokens, lengths=lengths, num_own=num_own, parents=None)
