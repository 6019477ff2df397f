"""Data types that proposers, policies and the acceptance law exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwise.core.random import StageUniforms, StepUniforms


@dataclass(frozen=True)
class TreeProbs:
    """The distributions that nodes of token trees were taken from.

    Attributes:
        parts: distributions of the draft, ``[rows, own vocab]`` float32 each. Their rows are
            numbered one after another.
        rows: ``[batch]`` the row of each node of a request. -1 for a node that has none: one that
            was proposed with certainty, or, in :class:`TreeSignals`, one that was copied. Empty for
            a tree without distributions.
        ids: ``[own vocab]`` int64 ids of the target; ``None`` if they are 0, 1, 2, …
        vocab_size: the target's vocabulary size.
    """

    parts: Sequence[Tensor]
    rows: Sequence[Sequence[int]]
    ids: Tensor | None
    vocab_size: int

    def of(self, request: int, node: int) -> Tensor | None:
        """``[vocab]`` the distribution that a node and its later siblings were drawn from.

        ``None`` if the node was proposed with certainty.
        """
        row = self.rows[request][node]
        if row < 0:
            return None
        for part in self.parts:
            if row < len(part):
                return self._widened(part[row : row + 1])[0]
            row -= len(part)
        raise IndexError(f"node {node} of request {request} has no distribution")

    def of_requests(self, indices: Sequence[int]) -> TreeProbs:
        """The distributions of some requests' nodes."""
        return replace(self, rows=[self.rows[index] for index in indices])

    def of_nodes(self, nodes: Sequence[Sequence[int]]) -> TreeProbs:
        """The distributions of some nodes of each request, ``[batch]``, in their order."""
        pairs = zip(self.rows, nodes, strict=True)
        rows = [[own[node] for node in chosen] if own else own for own, chosen in pairs]
        return replace(self, rows=rows)

    def over_vocabulary(self, rows: Tensor | slice) -> Tensor:
        """``[rows, vocab]`` some of the distributions."""
        parts = self.parts
        return self._widened((parts[0] if len(parts) == 1 else torch.cat(list(parts)))[rows])

    def _widened(self, own: Tensor) -> Tensor:
        """``[rows, vocab]`` of ``[rows, own vocab]``."""
        if self.ids is None:
            return own
        return own.new_zeros(len(own), self.vocab_size).index_copy_(1, self.ids, own)


@dataclass(frozen=True)
class TreeSignals:
    """What a draft model tells about the nodes of token trees, for a companion and for policies.

    Attributes:
        probs: the distribution of the draft at the parent of each node. It is q for drawn nodes,
            and the softmax at temperature 1 for greedy requests.
        acceptance: ``[batch]`` for each node, the estimated probability that it is accepted if its
            parent is. That of a drawn node is about its rank and not about its token.
        ranks: ``[batch]`` for each node, the number of its siblings that the model proposed before
            it; -1 for a copied one.
        limits: ``[batch]`` maximum numbers of nodes, known before anything was drafted.
    """

    probs: TreeProbs
    acceptance: Sequence[Sequence[float]]
    ranks: Sequence[Sequence[int]]
    limits: Sequence[int]

    def of_requests(self, indices: Sequence[int]) -> TreeSignals:
        """The signals of some requests' nodes."""
        return TreeSignals(
            self.probs.of_requests(indices),
            [self.acceptance[index] for index in indices],
            [self.ranks[index] for index in indices],
            [self.limits[index] for index in indices],
        )


@dataclass(frozen=True)
class Draft:
    """The tokens that a proposer proposed for each request of a step.

    Attributes:
        tokens: ``[batch, num_tokens]`` int64; entries beyond a request's length are 0.
        lengths: number of drafted tokens of each request, ``[batch]`` host integers.
        probs: ``[batch, num_tokens + 1, vocab]`` float32, the proposal distribution q at each
            drafted position, and zeros at positions beyond a request's length. ``None`` if every
            proposal is one-hot: q is 1 for the drafted token and 0 elsewhere. This is the case if
            every request is decoded greedily, or if the proposer does not sample.
        signals: the draft's signals; ``None`` if the policy does not use them.
        stage_uniforms: random numbers of a stage between draft and target, at least
            ``num_tokens`` for each request; ``None`` if every request is decoded greedily.
        is_one_hot: the requests whose tokens were proposed with certainty, ``[batch]``, instead of
            drawn from a distribution; ``None`` if there are none. Their rows of ``probs`` are
            undefined, unless the policy reads them (``Policy.reads_offers``).
        parents: ``[batch, num_tokens]`` int64, the index of the drafted token that each drafted
            token follows, -1 for the request's last token; ``None`` if every draft is a chain.
            Parents come before their children, so the first tokens of a tree are a tree. Its
            tokens are proposed with certainty, or drawn without replacement.
        passes: number of nodes, roots included, of which each pass of the draft model proposed the
            children; ``None`` for chains and if no model proposed the trees.
        tree_probs: what drawn trees were drawn from; ``None`` if all tokens of trees are proposed
            with certainty. Whether a node of a drawn tree is verified must not depend on its token.
        copied_nodes: ``[batch]`` the copied tokens of each request's tree, where a model proposed
            the others; ``None`` if there are none.
        tree_signals: signals of the nodes of token trees; ``None`` if no companion scores them.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    probs: Tensor | None
    signals: DraftSignals | None = None
    stage_uniforms: StageUniforms | None = None
    is_one_hot: tuple[bool, ...] | None = None
    parents: Tensor | None = None
    passes: tuple[int, ...] | None = None
    tree_probs: TreeProbs | None = None
    copied_nodes: tuple[frozenset[int], ...] | None = None
    tree_signals: TreeSignals | None = None

    @classmethod
    def empty(cls, num_requests: int, device: torch.device) -> Draft:
        """A draft without tokens."""
        tokens = torch.zeros(num_requests, 0, dtype=torch.long, device=device)
        return cls(tokens, (0,) * num_requests, None)

    @classmethod
    def one_hot(
        cls,
        tokens: Tensor,
        lengths: Sequence[int],
        vocab_size: int,
        uniforms: StepUniforms | None,
        acceptance: Tensor | None,
    ) -> Draft:
        """A draft with one-hot proposals, which stores no distributions.

        Args:
            tokens: ``[batch, num_tokens]`` int64; entries beyond a length are 0.
            lengths: ``[batch]`` number of proposed tokens of each request.
            vocab_size: vocabulary size of the target.
            uniforms: random numbers of the step; ``None`` if every request is decoded greedily.
            acceptance: ``[batch, num_tokens]`` float32 estimated acceptance probability of each
                token, 0 beyond a length. ``None`` for a draft without signals.
        """
        signals = None
        if acceptance is not None:
            signals = OneHotSignals(tokens, lengths, vocab_size, acceptance)
        stage = None if uniforms is None else uniforms.stage
        is_one_hot = tuple(length > 0 for length in lengths)
        return cls(tokens, tuple(lengths), None, signals, stage, is_one_hot)

    def is_drawn_tree(self, request: int) -> bool:
        """Whether a request has a token tree whose nodes, beside copied ones, were drawn."""
        return self.tree_probs is not None and bool(self.tree_probs.rows[request])

    @property
    def drafting(self) -> list[int]:
        """For each pass of the draft model, at how many places it proposed the next tokens."""
        if self.passes is not None:
            return list(self.passes)
        lengths = self.lengths
        if self.is_one_hot is not None:
            pairs = zip(lengths, self.is_one_hot, strict=True)
            lengths = tuple(0 if is_copied else length for length, is_copied in pairs)
        depths = range(max(lengths, default=0))
        return [sum(length > depth for length in lengths) for depth in depths]

    @property
    def copied(self) -> tuple[Collection[int], ...] | None:
        """``[batch]`` tokens that were copied from a known text; ``None`` if there are none."""
        if self.passes is not None or self.is_one_hot is None:
            return self.copied_nodes
        pairs = zip(self.lengths, self.is_one_hot, strict=True)
        return tuple(range(length) if is_copied else () for length, is_copied in pairs)

    @cached_property
    def host_tokens(self) -> list[list[int]]:
        """``tokens`` as lists on the host, copied once."""
        rows: list[list[int]] = self.tokens.tolist()
        return rows


@dataclass(frozen=True)
class DraftSignals:
    """Signals of a proposer, computed once per step. Entries beyond a length are 0.

    Attributes:
        draft_probs: ``[batch, num_tokens, vocab]`` float32, the draft's distribution at each
            position. This is q for sampled requests. For greedy requests q is one-hot, so this is
            the softmax at temperature 1 instead.
        entropy: ``[batch, num_tokens]`` float32, H of ``draft_probs`` in nats.
        token_probs: ``[batch, num_tokens]`` float32, the draft's probability of the drafted
            token.
    """

    draft_probs: Tensor
    entropy: Tensor
    token_probs: Tensor

    def of_requests(self, index: Tensor) -> DraftSignals:
        """The signals of some requests, ``[requests]`` by their index in the batch."""
        return DraftSignals(self.draft_probs[index], self.entropy[index], self.token_probs[index])


class OneHotSignals(DraftSignals):
    """Signals of one-hot proposals. The distributions are built only if they are read.

    A one-hot proposal has no probability and no entropy that would tell anything. Their places hold
    the estimated acceptance probability a of the token, and −a·log a − (1 − a)·log(1 − a).
    """

    def __init__(
        self, tokens: Tensor, lengths: Sequence[int], vocab_size: int, acceptance: Tensor
    ) -> None:
        """Create the signals of a draft.

        Args:
            tokens: ``[batch, num_tokens]`` int64.
            lengths: ``[batch]`` number of drafted tokens.
            vocab_size: size of the last dimension of the distributions.
            acceptance: ``[batch, num_tokens]`` float32 estimated acceptance probabilities, 0 beyond
                a length.
        """
        extents = torch.tensor(lengths, device=tokens.device).unsqueeze(1)
        drafted = (torch.arange(tokens.shape[1], device=tokens.device) < extents).float()
        entropy = torch.special.entr(acceptance) + torch.special.entr(1 - acceptance)
        self._set("entropy", entropy * drafted)
        self._set("token_probs", acceptance)
        self._set("_drafted", drafted)
        self._set("_tokens", tokens)
        self._set("_vocab_size", vocab_size)

    def of_requests(self, index: Tensor) -> OneHotSignals:
        """See :meth:`DraftSignals.of_requests`. No distribution is built."""
        known = vars(self)
        lengths = known["_drafted"][index].sum(dim=1).long().tolist()
        return OneHotSignals(
            known["_tokens"][index], lengths, known["_vocab_size"], self.token_probs[index]
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def draft_probs(self) -> Tensor:
        """``[batch, num_tokens, vocab]`` float32."""
        known = vars(self)
        if "_draft_probs" not in known:
            tokens: Tensor = known["_tokens"]
            dense = torch.zeros(*tokens.shape, known["_vocab_size"], device=tokens.device)
            dense.scatter_(2, tokens.unsqueeze(2), known["_drafted"].unsqueeze(2))
            self._set("_draft_probs", dense)
        made: Tensor = known["_draft_probs"]
        return made


@dataclass(frozen=True)
class CompanionScores:
    """A companion's signals about a draft. Entries beyond a request's length are 0.

    In token trees, each node has the S of its parent's position and its own A. Nodes without
    scores, and entries beyond a tree's length, have NaN there.

    Attributes:
        probs: ``[batch, num_tokens, vocab]`` float32, the companion's distribution c at each
            drafted position, with the same sampling parameters as the draft's. The vocabulary is
            left out, with size 0, for token trees.
        overlap: ``[batch, num_tokens]`` float32, S = Σ min(q, c).
        agreement: ``[batch, num_tokens]`` float32, A = min(1, c(x)/q(x)) of the drafted token.
        num_read: number of tokens of token trees that the companion read; ``None`` for chains, of
            which it reads as many tokens as it scores.
    """

    probs: Tensor
    overlap: Tensor
    agreement: Tensor
    num_read: int | None = None


@dataclass(frozen=True)
class Plan:
    """The tokens that the target verifies, and their proposals.

    Attributes:
        tokens: ``[batch, num_tokens]`` int64, as in :class:`Draft`.
        lengths: verification length of each request, ``[batch]`` host integers.
        proposals: ``[batch, num_tokens + 1, vocab]`` float32, the sub-distributions q′ with
            0 ≤ q′ ≤ q. Position ``lengths[b]`` holds q′ of the first position without a verified
            token: zeros after a cut that does not depend on the token drawn there, q·keep after a
            filter. ``None`` if every proposal is one-hot, as in :class:`Draft`. Then q′ is 1 for
            each verified token, and 0 at all positions beyond the verification length.
        num_own: number of leading tokens of each request that are the draft's own, for policies
            that replace tokens; ``None`` if all tokens are.
        between: two ``[batch, num_tokens]`` float32 tensors, the smallest and the largest
            probability that is proposed at each position. q′ equals ``proposals`` for tokens whose
            probability lies between them, and 0 for others. ``None`` if ``proposals`` is q′ itself.
        parents: as in :class:`Draft`, of the verified tokens.
        nodes: ``[batch]`` the drafted nodes of each token tree that are verified, in ascending
            order and with their ancestors; ``None`` if these are the first ones of each request. A
            policy that sets them leaves ``tokens`` as they were drafted.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    proposals: Tensor | None
    num_own: tuple[int, ...] | None = None
    between: tuple[Tensor, Tensor] | None = None
    parents: Tensor | None = None
    nodes: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def host_tokens(self) -> list[list[int]]:
        """``tokens`` as lists on the host, copied once."""
        rows: list[list[int]] = self.tokens.tolist()
        return rows

    @cached_property
    def host_parents(self) -> list[list[int]]:
        """``parents`` as lists on the host, copied once."""
        rows: list[list[int]] = [] if self.parents is None else self.parents.tolist()
        return rows

    def filtered(self) -> Plan:
        """The same plan with q′ itself as ``proposals``, and without ``between``."""
        if self.between is None or self.proposals is None:
            return replace(self, between=None)
        q = self.proposals[:, :-1]
        least, most = (bound.unsqueeze(2) for bound in self.between)
        proposals = self.proposals.clone()
        proposals[:, :-1] = q * ((q >= least) & (q <= most))
        return replace(self, proposals=proposals, between=None)


@dataclass(frozen=True)
class Outcome:
    """The result of verifying a plan.

    Attributes:
        num_drafted: drafted tokens per request, ``[batch]``.
        num_verified: verified tokens per request, ``[batch]``.
        num_accepted: accepted tokens per request, ``[batch]``.
        next_tokens: the corrected or bonus token of each request, ``[batch]``.
        acceptance: ``[batch, width]`` float32, the acceptance probability min(1, p(x)/q(x)) of
            each verified token, given that the tokens before it are accepted. At temperature 0 it
            is 1 where the token equals the target's argmax and 0 elsewhere. It is 0 beyond the
            verification length. ``None`` in a step in which no request gained tokens.
        failed: indices of requests whose target logits are NaN; their other entries are undefined.
        prefix_acceptance_prob: ``[batch, width]`` float32, the probability that each verified
            token and all before it are accepted; 0 beyond the verification length. Under block
            verification it exceeds the product of ``acceptance``. ``None`` if ``acceptance`` is.
        num_known: leading tokens of each request whose ``acceptance`` is known; ``None`` if it is
            known for all verified tokens. An observer that sees only the accepted tokens does not
            know the acceptance of tokens after the first rejection.
        is_one_hot: as in :class:`Draft`.
        paths: accepted nodes of each request's tree, from the root on, by their place among the
            verified ones; ``None`` if every draft is a chain. Acceptance of trees is not reported:
            ``num_known`` is then 0.
        copied: ``[batch]`` verified tokens that were copied from a known text; ``None`` if there
            are none.
        nodes: as in :class:`Plan`.
    """

    num_drafted: tuple[int, ...]
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    next_tokens: tuple[int, ...]
    acceptance: Tensor | None = None
    failed: frozenset[int] = frozenset()
    prefix_acceptance_prob: Tensor | None = None
    num_known: tuple[int, ...] | None = None
    is_one_hot: tuple[bool, ...] | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    copied: tuple[Collection[int], ...] | None = None
    nodes: tuple[tuple[int, ...], ...] | None = None

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """Number of leading tokens of each request with known acceptance."""
        return self.num_verified if self.num_known is None else self.num_known


# The parts of a step. Each is a field of :class:`StepTimes`.
PARTS = ("draft", "companion", "select", "verify", "accept", "rest")


@dataclass(frozen=True)
class StepTimes:
    """Duration of each part of a step, in seconds.

    Attributes:
        draft: the draft model's passes and the sampling of its tokens.
        companion: the companion's pass and its signals.
        select: the policy's selection of the tokens to verify.
        verify: the target's pass.
        accept: the acceptance law, including the computation of probabilities.
        rest: scheduling of this step and the commit of the previous one.
        num_prompt_tokens: prompt tokens that the step also processed.
        disturbed: whether requests of several policies were in the step, another step ran at the
            same time, or passes of new sizes were prepared as CUDA graphs.
    """

    draft: float
    companion: float
    select: float
    verify: float
    accept: float
    rest: float
    num_prompt_tokens: int = 0
    disturbed: bool = False

    @property
    def is_typical(self) -> bool:
        """Whether a policy can use these times to estimate the cost of its own steps."""
        return not self.num_prompt_tokens and not self.disturbed

    @property
    def total(self) -> float:
        """Duration of the whole step."""
        return self.draft + self.companion + self.select + self.verify + self.accept + self.rest
