"""Tokens that are proposed with certainty, and how a policy chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.trees import ROOT
from draftwise.core.types import Draft, DraftSignals, OneHotDraft
from draftwise.engine.drafting.loop import DraftProgress, answer
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.inputs import DraftPosition, RequestState


class ProposedTree(NamedTuple):
    """The token tree of one request.

    Attributes:
        tokens: ``[nodes]``.
        parents: ``[nodes]`` index of each node's parent; -1 for the root.
        values: ``[nodes]`` estimated probabilities that paths are accepted. They do not increase.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    values: Sequence[float] = ()


class Proposals(NamedTuple):
    """Tokens that are proposed with certainty.

    Attributes:
        tokens: ``[batch, width]`` int64.
        lengths: ``[batch]`` int64, number of proposed tokens of each request.
        acceptance: ``[batch, width]`` float64, estimated acceptance probability of each token if
            all tokens before it are accepted; 1 where nothing is known. In a token tree, the
            product up to a node is the probability that its path is accepted.
        parents: ``[batch, width]`` int64, as in :class:`TreeDraft`, with the most valuable nodes
            first; ``None`` if all proposals are chains.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    acceptance: NDArray[np.float64]
    parents: NDArray[np.int64] | None = None

    @classmethod
    def nothing(cls, num_requests: int, width: int = 0) -> Proposals:
        """No proposal for any request, in new arrays."""
        shape = num_requests, width
        lengths = np.zeros(num_requests, dtype=np.int64)
        return cls(np.zeros(shape, dtype=np.int64), lengths, np.ones(shape))

    @classmethod
    def of_trees(cls, trees: Sequence[ProposedTree]) -> Proposals:
        """``[batch]`` token trees; an empty one where nothing is proposed."""
        made = cls.nothing(len(trees), max((len(tree.tokens) for tree in trees), default=0))
        parents = np.full(made.tokens.shape, ROOT, dtype=np.int64)
        for row, (tokens, own_parents, own_values) in enumerate(trees):
            count = len(tokens)
            made.lengths[row] = count
            made.tokens[row, :count] = tokens
            parents[row, :count] = own_parents
            values = np.array([1.0, *own_values])
            made.acceptance[row, :count] = values[1:] / np.maximum(values[:-1], 1e-30)
        return made._replace(parents=parents)

    def offers(self) -> list[Sequence[float]]:
        """``[batch]`` estimated acceptance of the proposed tokens of each request."""
        rows: list[list[float]] = self.acceptance.tolist()
        return [row[:n] for row, n in zip(rows, self.lengths.tolist(), strict=True)]

    def cut_at_vocabulary(self, vocab_size: int) -> None:
        """Remove the first token of each request that does not exist, and those after it."""
        if not self.tokens.size or self.tokens.view(np.uint64).max() < vocab_size:
            return
        exists = (self.tokens >= 0) & (self.tokens < vocab_size)
        np.minimum(self.lengths, np.cumprod(exists, axis=1).sum(axis=1), out=self.lengths)

    def draft(
        self,
        lengths: Sequence[int],
        vocab_size: int,
        device: torch.device,
        uniforms: StepUniforms | None,
        signals: bool,
    ) -> OneHotDraft:
        """The draft of the first tokens of each request.

        Args:
            lengths: ``[batch]`` numbers of tokens, at most those that are proposed.
            vocab_size: the target's vocabulary size.
            device: device of the draft.
            uniforms: random numbers of the step; ``None`` if it needs none.
            signals: whether the draft needs signals.
        """
        width = max(lengths, default=0)
        tokens, known = self.tokens[:, :width].copy(), None
        if signals:
            known = self.acceptance[:, :width].astype(np.float32)
        for row, length in enumerate(lengths):
            if length < width:
                tokens[row, length:] = 0
                if known is not None:
                    known[row, length:] = 0
        acceptance = None if known is None else torch.from_numpy(known).to(device)
        drafted = torch.from_numpy(tokens).to(device)
        draft = OneHotDraft.of(drafted, lengths, vocab_size, uniforms, acceptance)
        if self.parents is None:
            return draft
        return draft.as_tree(torch.from_numpy(self.parents[:, :width].copy()).to(device))


def planned_lengths(made: Proposals, states: Sequence[RequestState], policy: Policy) -> list[int]:
    """``[batch]`` draft lengths, chosen by the estimated acceptance of all proposed tokens.

    Args:
        made: the proposals of the step.
        states: its requests, without a model.
        policy: chooses the lengths over the whole batch.
    """
    if made.lengths.any():
        states = [
            state._replace(offer=offer, draft_limit=len(offer))
            for state, offer in zip(states, made.offers(), strict=True)
        ]
    return list(planned_drafts(policy, states).lengths)


def stopped_draft(
    made: Proposals,
    lengths: list[int],
    policy: Policy,
    vocab_size: int,
    device: torch.device,
    uniforms: StepUniforms | None,
) -> Draft:
    """The draft, cut where the policy stops it. Token trees have no one place to stop.

    Args:
        made: the proposals of the step.
        lengths: ``[batch]`` maximum draft lengths, at most those that are proposed.
        policy: is asked after each token which requests continue.
        vocab_size, device, uniforms: see :meth:`Proposals.draft`.
    """
    signals = policy.uses_draft_signals
    draft = made.draft(lengths, vocab_size, device, uniforms, signals)
    if made.parents is not None or not policy.may_stop_drafting:
        return draft
    progress = DraftProgress(draft.lengths)
    while progress.active:
        answered = answer(policy, _position(draft, progress.num_tokens, progress.active))
        progress.advance(answered)
    return made.draft(progress.lengths, vocab_size, device, uniforms, signals)


class _OneHotPosition(DraftPosition):
    """A position of one-hot proposals. Its distributions are built only if they are read."""

    def __init__(
        self, index: int, active: list[int], tokens: Tensor, signals: DraftSignals
    ) -> None:
        """Set up; see :class:`DraftPosition`."""
        values = {
            "index": index,
            "requests": active,
            "tokens": tokens,
            "entropy": signals.entropy[active, index],
            "token_probs": signals.token_probs[active, index],
            "agreement": None,
            "_signals": signals,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def draft_probs(self) -> Tensor | None:
        """``[active, vocab]`` float32."""
        signals: DraftSignals = vars(self)["_signals"]
        return signals.draft_probs[list(self.requests), self.index]


def _position(draft: Draft, index: int, active: list[int]) -> DraftPosition:
    tokens, signals = draft.tokens[active, index], draft.signals
    if signals is None:
        return DraftPosition(index, active, tokens, None, None, None)
    return _OneHotPosition(index, active, tokens, signals)
