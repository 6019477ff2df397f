"""The token trees of a step, as a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from draftwise.core.random import StepUniforms
from draftwise.core.types import Draft, TreeProbs, TreeSignals
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.growing_tree import CopiedToken
from draftwise.engine.proposers.proposals import Proposals, ProposedTree


class DraftedTrees(NamedTuple):
    """The token trees of a step.

    Attributes:
        proposals: the nodes of each request.
        passes: number of tokens in each pass of the model; ``None`` if all tokens are copied.
        tree_probs: what drawn trees were drawn from; ``None`` without any.
        copied: ``[batch]`` the copied nodes of each tree; ``None`` if there are none.
        tree_signals: signals for a companion and for policies; ``None`` if they are not wanted.
    """

    proposals: Proposals
    passes: tuple[int, ...] | None = ()
    tree_probs: TreeProbs | None = None
    copied: tuple[frozenset[int], ...] | None = None
    tree_signals: TreeSignals | None = None

    def draft(
        self,
        lengths: Sequence[int],
        context: ProposerContext,
        uniforms: StepUniforms | None,
        signals: bool,
    ) -> Draft:
        """The draft of the first nodes of each tree.

        Args:
            lengths: ``[batch]`` number of nodes that are worth verifying. Drawn trees stay whole,
                as their nodes are not in the order of their values.
            context: the context of the proposer.
            uniforms: random numbers of the step; ``None`` if every request is decoded greedily.
            signals: whether the draft needs signals.
        """
        drawn = [False] * len(lengths)
        if self.tree_probs is not None:
            drawn = [bool(rows) for rows in self.tree_probs.rows]
            every = self.proposals.lengths.tolist()
            lengths = [
                all_ if own else n for all_, own, n in zip(every, drawn, lengths, strict=True)
            ]
        made = self.proposals.draft(lengths, context.vocab_size, context.device, uniforms, signals)
        is_one_hot = tuple(n > 0 and not own for n, own in zip(lengths, drawn, strict=True))
        return replace(
            made,
            is_one_hot=is_one_hot,
            passes=self.passes,
            tree_probs=self.tree_probs,
            copied_nodes=self.copied,
            tree_signals=self.tree_signals,
        )


def all_trees(trees: Mapping[int, ProposedTree], num_requests: int) -> list[ProposedTree]:
    """The trees of all requests, of which some have one."""
    return [trees.get(index, ProposedTree()) for index in range(num_requests)]


def chain_of(copied: Sequence[CopiedToken]) -> ProposedTree:
    """A tree of copied tokens alone."""
    values = list(accumulate((token.acceptance for token in copied), mul))
    tokens, parents = [token.token for token in copied], range(-1, len(copied) - 1)
    return ProposedTree(tokens, parents, values, frozenset(range(len(copied))))


def worth_verifying(copied: Sequence[CopiedToken], least: float) -> Sequence[CopiedToken]:
    """The first copied tokens, as long as the probability that all are accepted is large enough."""
    values = accumulate((token.acceptance for token in copied), mul)
    return copied[: sum(value >= least for value in values)]
