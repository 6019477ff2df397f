"""Data types that proposers, policies and the acceptance law exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwise.core.random import StageUniforms, StepUniforms


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens for each request of a step.

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
        is_copied: the requests whose tokens continue a known text, ``[batch]``. They are one-hot.
            ``None`` in a step that looks for no such text.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    probs: Tensor | None
    signals: DraftSignals | None = None
    stage_uniforms: StageUniforms | None = None
    is_one_hot: tuple[bool, ...] | None = None
    is_copied: tuple[bool, ...] | None = None

    @classmethod
    def empty(cls, num_requests: int, device: torch.device) -> Draft:
        """A draft without tokens."""
        tokens = torch.zeros(num_requests, 0, dtype=torch.long, device=device)
        return Draft(tokens, (0,) * num_requests, None)

    @property
    def drafting(self) -> list[int]:
        """For each pass of the draft model, at how many places it proposed the next tokens."""
        lengths = self.lengths
        if self.is_copied is not None:
            pairs = zip(lengths, self.is_copied, strict=True)
            lengths = tuple(0 if is_copied else length for length, is_copied in pairs)
        depths = range(max(lengths, default=0))
        return [sum(length > depth for length in lengths) for depth in depths]

    @property
    def copied(self) -> tuple[Collection[int], ...] | None:
        """``[batch]`` tokens that were copied from a known text; ``None`` if there are none."""
        if self.is_copied is None:
            return None
        pairs = zip(self.lengths, self.is_copied, strict=True)
        return tuple(range(length) if is_copied else () for length, is_copied in pairs)

    @cached_property
    def host_tokens(self) -> list[list[int]]:
        """``tokens`` as lists on the host, copied once."""
        rows: list[list[int]] = self.tokens.tolist()
        return rows

    def of_requests(self, own: list[int], with_signals: bool) -> Draft:
        """The draft of some requests, with its own storage.

        Args:
            own: their indices in the batch.
            with_signals: whether it has signals.
        """
        index, uniforms = torch.tensor(own, device=self.tokens.device), self.stage_uniforms
        return replace(
            self,
            tokens=self.tokens[index],
            lengths=tuple(self.lengths[i] for i in own),
            probs=None if self.probs is None else self.probs[index],
            signals=self.signals.of_requests(index) if with_signals and self.signals else None,
            stage_uniforms=None
            if uniforms is None
            else StageUniforms(uniforms.accept[own], uniforms.final[own]),
            is_one_hot=None if self.is_one_hot is None else tuple(self.is_one_hot[i] for i in own),
            is_copied=None if self.is_copied is None else tuple(self.is_copied[i] for i in own),
        )


class OneHotDraft(Draft):
    """Chains of tokens that are all proposed with certainty. No distributions are stored."""

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        lengths: Sequence[int],
        vocab_size: int,
        uniforms: StepUniforms | None,
        acceptance: Tensor | None,
    ) -> OneHotDraft:
        """Create a draft.

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
        return OneHotDraft(tokens, tuple(lengths), None, signals, stage, is_one_hot, is_one_hot)

    def as_tree(self, parents: Tensor) -> TreeDraft:
        """The same tokens as nodes of token trees; see :class:`TreeDraft`."""
        known = (self.signals, self.stage_uniforms, self.is_one_hot, self.is_copied)
        return TreeDraft(self.tokens, self.lengths, None, *known, parents=parents)


@dataclass(frozen=True, kw_only=True)
class TreeDraft(OneHotDraft):
    """A token tree for each request. Its tokens are proposed with certainty.

    Attributes:
        parents: ``[batch, num_tokens]`` int64, the index of the drafted token that each drafted
            token follows, -1 for the request's last token. Parents come before their children, so
            the first tokens of a tree are a tree.
        passes: number of nodes, roots included, of which each pass of the draft model proposed the
            children; ``None`` if no model proposed the trees.
    """

    parents: Tensor
    passes: tuple[int, ...] | None = None

    @property
    def drafting(self) -> list[int]:
        """See :attr:`Draft.drafting`."""
        return super().drafting if self.passes is None else list(self.passes)

    @property
    def copied(self) -> tuple[Collection[int], ...] | None:
        """See :attr:`Draft.copied`."""
        return super().copied if self.passes is None else None

    def of_requests(self, own: list[int], with_signals: bool) -> Draft:
        """See :meth:`Draft.of_requests`."""
        whole = replace(self, parents=self.parents[own])
        return super(TreeDraft, whole).of_requests(own, with_signals)


@dataclass(frozen=True)
class DraftSignals:
    """Signals of a proposer, computed once per step. Entries beyond a length are 0.

    Attributes:
        draft_probs: ``[batch, num_tokens, vocab]`` float32, the draft's distribution at each
            position. This is q for sampled requests. Where q is one-hot, it is what the most likely
            token was taken from, at temperature 1 for greedy requests.
        entropy: ``[batch, num_tokens]`` float32, H of ``draft_probs`` in nats.
        token_probs: ``[batch, num_tokens]`` float32, the draft's probability of the drafted
            token.
        confidence: ``[batch, num_tokens]`` float32, the probability that each token is accepted if
            all before it are, as the draft's own head estimated it before the token was drawn;
            ``None`` for drafts without such a head.
    """

    draft_probs: Tensor
    entropy: Tensor
    token_probs: Tensor
    confidence: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that the proposer has, in their order."""
        every = (self.draft_probs, self.entropy, self.token_probs, self.confidence)
        return [each for each in every if each is not None]

    def of_requests(self, index: Tensor) -> DraftSignals:
        """The signals of some requests, ``[requests]`` by their index in the batch."""
        return DraftSignals(*(each[index] for each in self.tensors))


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

    Attributes:
        probs: ``[batch, num_tokens, vocab]`` float32, the companion's distribution c at each
            drafted position, with the same sampling parameters as the draft's.
        overlap: ``[batch, num_tokens]`` float32, S = Σ min(q, c).
        agreement: ``[batch, num_tokens]`` float32, A = min(1, c(x)/q(x)) of the drafted token.
    """

    probs: Tensor
    overlap: Tensor
    agreement: Tensor

    def of_requests(self, index: Tensor) -> CompanionScores:
        """The scores of some requests, ``[requests]`` by their index in the batch."""
        return CompanionScores(self.probs[index], self.overlap[index], self.agreement[index])


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
        parents: as in :class:`TreeDraft`, of the verified tokens; ``None`` for chains.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    proposals: Tensor | None
    num_own: tuple[int, ...] | None = None
    parents: Tensor | None = None

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
        is_copied: as in :class:`Draft`.
        paths: accepted nodes of each request's tree, from the root on, by their place among the
            verified ones; ``None`` if every draft is a chain. Acceptance of trees is not reported:
            ``num_known`` is then 0.
        copied: ``[batch]`` verified tokens that were copied from a known text; ``None`` if there
            are none.
    """

    num_drafted: tuple[int, ...]
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    next_tokens: tuple[int, ...]
    acceptance: Tensor | None = None
    failed: frozenset[int] = frozenset()
    prefix_acceptance_prob: Tensor | None = None
    num_known: tuple[int, ...] | None = None
    is_copied: tuple[bool, ...] | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    copied: tuple[Collection[int], ...] | None = None

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """Number of leading tokens of each request with known acceptance."""
        return self.num_verified if self.num_known is None else self.num_known

    def of_requests(self, own: list[int]) -> Outcome:
        """The result of some requests, by their indices in the batch."""
        prefixes = self.prefix_acceptance_prob
        return Outcome(
            tuple(self.num_drafted[i] for i in own),
            tuple(self.num_verified[i] for i in own),
            tuple(self.num_accepted[i] for i in own),
            tuple(self.next_tokens[i] for i in own),
            None if self.acceptance is None else self.acceptance[own],
            frozenset(at for at, i in enumerate(own) if i in self.failed),
            None if prefixes is None else prefixes[own],
            tuple(self.known_lengths[i] for i in own),
            paths=None if self.paths is None else tuple(self.paths[i] for i in own),
        )


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
            same time, or passes of new sizes were prepared.
        prepared: whether passes of new sizes were prepared, as CUDA graphs.
        looking: the part of ``draft`` in which continuations were looked for beside a draft model.
    """

    draft: float
    companion: float
    select: float
    verify: float
    accept: float
    rest: float
    num_prompt_tokens: int = 0
    disturbed: bool = False
    prepared: bool = False
    looking: float = 0.0

    @property
    def is_typical(self) -> bool:
        """Whether a policy can use these times to estimate the cost of its own steps."""
        return not self.num_prompt_tokens and not self.disturbed

    @property
    def total(self) -> float:
        """Duration of the whole step."""
        return self.draft + self.companion + self.select + self.verify + self.accept + self.rest
