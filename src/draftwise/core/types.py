"""What draft sources, policies and the acceptance law pass to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.random import StageUniforms

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Draft:
    """What the draft source proposed for each request of a step.

    Attributes:
        tokens: ``[batch, num_tokens]`` int64; entries beyond a request's length are 0.
        lengths: number of drafted tokens of each request, ``[batch]`` host integers.
        probs: ``[batch, num_tokens + 1, vocab]`` float32, the draft's distribution q at each
            drafted position, and zeros from a request's length on. ``None`` when every request
            of the step is decoded greedily, where q is not needed.
        parents: index of the token each drafted token follows, -1 for the request's last token.
            A chain is ``(-1, 0, 1, …)``; it is the same for all requests of a step.
        signals: what the draft knows of itself; ``None`` if the policy does not ask.
        stage_uniforms: random numbers that are the policy's own, at least ``num_tokens`` of each
            request; ``None`` when every request is decoded greedily.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    probs: Tensor | None
    parents: tuple[int, ...]
    signals: DraftSignals | None = None
    stage_uniforms: StageUniforms | None = None


@dataclass(frozen=True)
class DraftSignals:
    """What the draft knows of itself, computed once per step. Entries beyond a length are 0.

    Attributes:
        beliefs: ``[batch, num_tokens, vocab]`` float32, what the draft thinks of each position: q
            itself, and for greedy requests, whose q is one-hot, the distribution at temperature 1.
        entropy: ``[batch, num_tokens]`` float32, H of the beliefs in nats.
        token_probs: ``[batch, num_tokens]`` float32, the belief in the drafted token.
    """

    beliefs: Tensor
    entropy: Tensor
    token_probs: Tensor


@dataclass(frozen=True)
class DraftRule:
    """Who goes on drafting and what is verified, as numbers: nobody is asked after each token.

    The acceptance of a drafted token is taken to be P = σ(w₀ + w₁l + w₂l² + w₃h + w₄h² + w₅hl +
    w₆·history + w₇·min(i, last)/last), within the bounds, with l = log max(q(x), smallest), h =
    min(H, largest) and i its position. A request goes on while the product of its P is what is
    needed, or more. A token is verified if P without the bounds, times the product of those before,
    is as much as the request's threshold, or if next to nothing is needed of it; which q(x) make
    it so lies between two values, of two ranges on either side of what is not the upper one.

    Attributes:
        weights: ``[2, 8]`` float64, of sampled and of greedy requests.
        smallest_token_prob, largest_entropy, last_position: bounds of l, h and i.
        bounds: of P.
        greedy: ``[batch]`` bool.
        history: ``[batch]`` float64.
        exempt: ``[batch]`` bool, who goes on whatever is needed.
        needed: ``[batch + 1, longest + 1]`` float64, by how many draft and how many tokens each
            may still draft.
        thresholds: ``[batch]`` float64; 0 verifies whatever is drafted.
        next_to_nothing: P that is taken for granted.
        notes: what is written while the rule is followed.
    """

    weights: Floats
    smallest_token_prob: float
    largest_entropy: float
    last_position: int
    bounds: tuple[float, float]
    greedy: NDArray[np.bool_]
    history: Floats
    exempt: NDArray[np.bool_]
    needed: Floats
    thresholds: Floats
    next_to_nothing: float
    notes: RuleNotes


@dataclass(frozen=True)
class RuleNotes:
    """What came of a :class:`DraftRule`.

    Attributes:
        expected: ``[batch, longest]`` float64, P of each drafted token.
        reach: ``[batch]`` float64, their products; begins with ones.
        least, most: ``[batch, longest]`` float32, the q(x) between which a token is verified; begin
            with 0 and infinity, and stay so for greedy requests.
        kept: ``[batch]`` int64, leading tokens that are verified; -1 as long as nobody followed the
            rule.
    """

    expected: Floats
    reach: Floats
    least: NDArray[np.float32]
    most: NDArray[np.float32]
    kept: NDArray[np.int64]

    @classmethod
    def blank(cls, num_requests: int, longest: int) -> RuleNotes:
        """Before anything was drafted."""
        return cls(
            np.zeros((num_requests, longest)),
            np.ones(num_requests),
            np.zeros((num_requests, longest), dtype=np.float32),
            np.full((num_requests, longest), np.inf, dtype=np.float32),
            np.full(num_requests, -1, dtype=np.int64),
        )

    def are_about(self, draft: Draft) -> bool:
        """Whether all of a draft was written by the rule."""
        return bool((self.kept[np.asarray(draft.lengths) > 0] >= 0).all())

    def part(self, indices: Sequence[int]) -> RuleNotes:
        """A copy of those of some requests."""
        at = np.asarray(indices, dtype=np.int64)
        return RuleNotes(*(values[at] for values in vars(self).values()))

    def put(self, indices: Sequence[int], part: RuleNotes) -> None:
        """Take over what came of some requests."""
        at = np.asarray(indices, dtype=np.int64)
        for name, values in vars(self).items():
            values[at] = getattr(part, name)


@dataclass(frozen=True)
class Judgement:
    """What a companion thinks of a draft. Entries beyond a request's length are 0.

    Attributes:
        beliefs: ``[batch, num_tokens, vocab]`` float32, the companion's distribution c at each
            drafted position, processed as the draft's beliefs are.
        overlap: ``[batch, num_tokens]`` float32, S = Σ min(q, c).
        agreement: ``[batch, num_tokens]`` float32, A = min(1, c(x)/q(x)) of the drafted token.
    """

    beliefs: Tensor
    overlap: Tensor
    agreement: Tensor


@dataclass(frozen=True)
class Plan:
    """What the target is asked to verify.

    Attributes:
        tokens: ``[batch, num_tokens]`` int64, as in :class:`Draft`.
        lengths: verification length of each request, ``[batch]`` host integers.
        proposals: ``[batch, num_tokens + 1, vocab]`` float32, the sub-distributions q′ with
            0 ≤ q′ ≤ q. Position ``lengths[b]`` holds q′ where no token is verified: zeros after a
            cut that did not look at the token drawn there, q·keep where it did. ``None`` when
            every request is decoded greedily.
        num_own: how many leading tokens of each request are the draft's own, where a policy puts
            others in their place; ``None`` for all of them.
        between: two ``[batch, num_tokens]`` float32 tensors, the least and the largest probability
            that is proposed at each position: q′ is what ``proposals`` holds where that lies
            between them, and 0 elsewhere. ``None`` where ``proposals`` is q′ itself.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    proposals: Tensor | None
    num_own: tuple[int, ...] | None = None
    between: tuple[Tensor, Tensor] | None = None

    def filtered(self) -> Plan:
        """The same with q′ itself for proposals."""
        if self.between is None or self.proposals is None:
            return replace(self, between=None)
        q = self.proposals[:, :-1]
        least, most = (bound.unsqueeze(2) for bound in self.between)
        proposals = self.proposals.clone()
        proposals[:, :-1] = q * ((q >= least) & (q <= most))
        return replace(self, proposals=proposals, between=None)


@dataclass(frozen=True)
class Outcome:
    """What the target made of a plan.

    Attributes:
        num_drafted: drafted tokens per request, ``[batch]``.
        num_verified: verified tokens per request, ``[batch]``.
        num_accepted: accepted tokens per request, ``[batch]``.
        next_tokens: the corrected or bonus token of each request, ``[batch]``.
        acceptance: ``[batch, width]`` float32, the acceptance probability min(1, p(x)/q(x)) of
            each verified token (given that the tokens before it were kept; at temperature 0
            whether the target agrees); 0 beyond the verification length. ``None`` in a step in
            which no request gained tokens.
        failed: indices of requests for which the target gave no numbers; their other entries
            mean nothing.
        reach: ``[batch, width]`` float32, the probability that each verified token and all before
            it are kept; 0 beyond the verification length. More than the product of ``acceptance``
            where whole blocks are verified. ``None`` as ``acceptance`` is.
        num_known: leading tokens of each request whose ``acceptance`` is known; ``None`` for all
            that were verified. Who sees only what was accepted knows nothing of what comes after
            the first token that was not.
    """

    num_drafted: tuple[int, ...]
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    next_tokens: tuple[int, ...]
    acceptance: Tensor | None = None
    failed: frozenset[int] = frozenset()
    reach: Tensor | None = None
    num_known: tuple[int, ...] | None = None

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """Leading tokens of each request whose acceptance is known."""
        return self.num_verified if self.num_known is None else self.num_known


# Of a step, each a field of its times.
PARTS = ("draft", "companion", "select", "verify", "accept", "rest")


@dataclass(frozen=True)
class StepTimes:
    """Where a step's time went, in seconds.

    Attributes:
        draft: the draft model and the drawing of its tokens.
        companion: the companion's pass and its signals.
        select: the policy's choice of what to verify.
        verify: the target's pass.
        accept: the acceptance law, probabilities included.
        rest: scheduling before and the commit of the step before.
        num_prompt_tokens: prompt tokens that the step processed beside.
        shared: requests of several policies were in the step.
    """

    draft: float
    companion: float
    select: float
    verify: float
    accept: float
    rest: float
    num_prompt_tokens: int = 0
    shared: bool = False

    @property
    def is_typical(self) -> bool:
        """Whether a policy may learn from it what its own steps cost."""
        return not self.num_prompt_tokens and not self.shared

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.companion + self.select + self.verify + self.accept + self.rest
