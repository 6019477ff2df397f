"""The interface of a policy, which gets numbers and returns lengths.

In every step the engine calls a policy's methods in this order:

1. :meth:`Policy.draft_lengths`: returns the maximum draft length of each request. A proposer that
   knows continuations before anything is drafted calls :meth:`Policy.plan_drafts` instead. One that
   can draft token trees asks :meth:`Policy.branches` first.
2. :meth:`Policy.keep_drafting`: decides after each drafted token which requests continue. For token
   trees of a draft model, :meth:`Policy.grow_trees` decides which nodes get children.
3. :meth:`Policy.wants_companion`: decides whether the companion scores the draft.
4. :meth:`Policy.select`: selects the drafted tokens to verify, and their proposals q′.
5. :meth:`Policy.observe`: learns from the acceptance decisions and the step's times.

The output keeps the target's distribution if each decision about a position satisfies one of two
conditions. Either it uses nothing that was drawn at or after that position. Or the policy returns
the filtered proposal that the decision implies (see :mod:`draftwise.core.rejection`). A position is
either cut (q′ = 0) or filtered (q′ = q·keep), based on the tokens before it. The choice between the
two must not depend on the token drawn there. Whether the companion scores the draft may only depend
on earlier steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.goodput import expected_accepted
from draftwise.core.rules import DraftRule
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes

if TYPE_CHECKING:
    from draftwise.core.latency import LatencyModel
    from draftwise.estimators.profile import AcceptanceProfile


# Initial estimate for a request without verified tokens, and the weight of each new token.
_INITIAL_MEAN = 0.6
_TOKEN_WEIGHT = 0.1


class Signal(StrEnum):
    """A kind of information that a policy uses."""

    ENTROPY = "H"
    TOKEN_PROBABILITY = "q(x)"
    OVERLAP = "S"
    AGREEMENT = "A"
    HISTORY = "history"
    POSITION = "position"
    LOAD = "load"
    TARGET = "target"


_OF_THE_DRAFT = {Signal.ENTROPY, Signal.TOKEN_PROBABILITY}
_OF_THE_COMPANION = {Signal.OVERLAP, Signal.AGREEMENT}


class AcceptanceHistory:
    """Mean acceptance probability of a request's recent tokens, with exponential forgetting.

    Attributes:
        mean: running mean, 0 … 1.
    """

    def __init__(self) -> None:
        """Start from the initial estimate."""
        self.mean = _INITIAL_MEAN

    def learn(self, acceptance: Sequence[float]) -> None:
        """Update the mean with the acceptance probabilities of a step's verified tokens.

        Each token is weighted by the probability that all tokens before it were accepted.

        Args:
            acceptance: acceptance probability of each verified token, in draft order.
        """
        reach_probability = 1.0
        for probability in acceptance:
            self.mean += _TOKEN_WEIGHT * reach_probability * (probability - self.mean)
            reach_probability *= probability


class RequestState(NamedTuple):
    """The state of a request before a step, as a policy sees it.

    Attributes:
        num_tokens: number of tokens so far, prompt and output.
        num_output_tokens: number of tokens generated so far.
        draft_limit: maximum draft length, limited by the remaining output and the models' contexts;
            0 while the prompt is being processed.
        request_id: unique number.
        greedy: whether it is decoded at temperature 0.
        history: mean acceptance probability of its recent tokens, 0 … 1.
        policy: name of the policy that it requests; ``None`` for the engine's.
        expected_remaining: expected number of tokens until it ends, if no other request takes its
            place then; 0 if one does.
        offer: estimated acceptance probability of each token of a continuation that is known
            before anything is drafted, such as the text after an earlier occurrence of the last
            tokens. Empty without one.
        has_model: whether a draft model can draft for it.
        num_behind: number of its tokens that the draft model has not read yet, besides the newest.
    """

    num_tokens: int
    num_output_tokens: int
    draft_limit: int
    request_id: int = 0
    greedy: bool = False
    history: float = 0.5
    policy: str | None = None
    expected_remaining: float = 0.0
    offer: Sequence[float] = ()
    has_model: bool = True
    num_behind: int = 0


class DraftChoice(NamedTuple):
    """What is drafted for one request.

    Attributes:
        length: maximum number of drafted tokens.
        uses_offer: whether the tokens are those of the offer. Otherwise the draft model writes
            them.
    """

    length: int
    uses_offer: bool


class TreeLevel(NamedTuple):
    """Nodes of token trees whose children the draft model may propose next.

    Attributes:
        depth: number of tokens on the path to each node, itself included.
        requests: ``[nodes]`` index of each node's request in the step's batch.
        values: ``[nodes]`` estimated probability that the path to each node is accepted.
        entropy: ``[nodes]`` entropy in nats of the draft's distribution that each node's token was
            taken from; ``None`` if the policy uses no signals of the draft.
        coverage: estimated probability that the target's token is among the children of a node that
            it reaches, and is not a copied token there, from the level before. Children that are
            not worth verifying do not count.
        num_nodes: number of nodes of all trees that may be verified so far.
    """

    depth: int
    requests: Sequence[int]
    values: NDArray[np.float64]
    entropy: NDArray[np.float64] | None
    coverage: float
    num_nodes: int


@dataclass(frozen=True)
class DraftPosition:
    """The token just drafted, for the requests that are still drafting.

    The signals are ``None`` if the policy uses none of the draft's signals.

    Attributes:
        index: position in the draft, from 0.
        requests: index of each ``active`` request in the step's batch.
        tokens: ``[active]`` int64, the token drawn.
        draft_probs: ``[active, vocab]`` float32, the draft's own distribution: q, and for greedy
            requests the distribution at temperature 1.
        entropy: ``[active]`` float32, H of ``draft_probs`` in nats.
        token_probs: ``[active]`` float32, the probability of the drawn token in ``draft_probs``.
        agreement: ``[active]`` float32, the target's acceptance probability of the token, for
            policies with ``uses_target_oracle``.
    """

    index: int
    requests: Sequence[int]
    tokens: Tensor
    draft_probs: Tensor | None
    entropy: Tensor | None
    token_probs: Tensor | None
    agreement: Tensor | None = None

    def with_agreement(self, agreement: Tensor) -> DraftPosition:
        """A copy with the target's acceptance probabilities, ``[active]`` float32."""
        return replace(self, agreement=agreement)


class LazyPosition(DraftPosition):
    """A position whose distributions are fetched from the draft's memory on first access."""

    def __init__(
        self,
        index: int,
        requests: Sequence[int],
        tokens: Tensor,
        everyone: Tensor,
        entropy: Tensor,
        token_probs: Tensor,
        agreement: Tensor | None = None,
        widen: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Set up. The other arguments are those of :class:`DraftPosition`.

        Args:
            everyone: ``[batch, vocab]`` float32 distributions of all requests, on any device.
            widen: converts distributions to the target's vocabulary; ``None`` if they are over it.
        """
        values = {
            "index": index,
            "requests": requests,
            "tokens": tokens,
            "_everyone": everyone,
            "entropy": entropy,
            "token_probs": token_probs,
            "agreement": agreement,
            "_widen": widen,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_agreement(self, agreement: Tensor) -> LazyPosition:
        """See :class:`DraftPosition`."""
        assert self.entropy is not None
        assert self.token_probs is not None
        return LazyPosition(
            self.index,
            self.requests,
            self.tokens,
            vars(self)["_everyone"],
            self.entropy,
            self.token_probs,
            agreement,
            vars(self)["_widen"],
        )

    @property
    def draft_probs(self) -> Tensor | None:
        """``[active, vocab]`` float32 on the host."""
        everyone: Tensor = vars(self)["_everyone"]
        widen: Callable[[Tensor], Tensor] | None = vars(self)["_widen"]
        probs = everyone.cpu()[list(self.requests)]
        return probs if widen is None else widen(probs)


@dataclass(frozen=True)
class PolicyContext:
    """The context in which a policy is created, in addition to its options.

    Attributes:
        num_speculative_tokens: maximum draft length per step.
        latency: step costs on this machine; ``None`` for policies that do not use it.
        profile: acceptance statistics of these models; ``None`` without a profile.
        has_companion: whether there is a companion to score drafts.
        has_draft: whether there is a draft model.
        for_studies: whether policies with ``uses_target_oracle`` are allowed.
        drafts_trees: whether the drafts are token trees.
    """

    num_speculative_tokens: int
    latency: LatencyModel | None = None
    profile: AcceptanceProfile | None = None
    has_companion: bool = False
    has_draft: bool = True
    for_studies: bool = False
    drafts_trees: bool = False

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The profile's estimator parameters, by estimator; empty without a profile."""
        return {} if self.profile is None else self.profile.parameters


class Policy(ABC):
    """Decides when to stop drafting and what to verify.

    Attributes:
        name: the name that users give.
        summary: one line for listings.
        source: where the method was published.
        signals: the kinds of information that it uses.
        lossless: whether the output keeps exactly the target's distribution.
        needs_draft: whether it uses a draft model.
        needs_companion: whether it requires a companion.
        needs_profile: whether it requires an acceptance profile.
        needs_latency: whether it requires step costs to price its choices.
        uses_target_oracle: whether the target itself scores drafts at no cost; for studies only.
        filters: whether it may drop a token based on the token itself, with a filtered proposal.
            Other policies only cut, based on earlier tokens.
        replaces_tokens: whether it may replace drafted tokens by other tokens.
        verifies_trees: whether it can select among the nodes of token trees.
        scores_offers: whether it lets a companion score continuations of which the acceptance is
            estimated before anything is drafted.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    signals: ClassVar[frozenset[Signal]] = frozenset()
    lossless: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    needs_companion: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = False
    needs_latency: ClassVar[bool] = False
    uses_target_oracle: ClassVar[bool] = False
    filters: ClassVar[bool] = False
    replaces_tokens: ClassVar[bool] = False
    verifies_trees: ClassVar[bool] = False
    scores_offers: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        self.num_speculative_tokens = context.num_speculative_tokens

    def uses_draft_signals(self) -> bool:
        """Whether the draft's signals must be computed."""
        return bool(self.signals & (_OF_THE_DRAFT | _OF_THE_COMPANION))

    @classmethod
    def uses_companion(cls) -> bool:
        """Whether the policy makes use of a companion."""
        return bool(cls.signals & _OF_THE_COMPANION) or cls.needs_companion

    @abstractmethod
    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """The maximum draft length of each request, at most its ``draft_limit``."""

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether continuations are looked for in this step. It must not depend on them.

        It is asked before :meth:`plan_drafts` where no draft model is used, and before token trees
        are drafted. Looking takes time, which a policy may save. If the answer is no,
        :meth:`skip_drafts` replaces :meth:`plan_drafts`.

        Args:
            requests: the requests of the step, without offers.
        """
        return True

    def adds_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether continuations are looked for beside a draft model in this step.

        It is asked before all else but :meth:`branches` where both draft chains. If the answer is
        no, the step is one of the draft model alone, and :meth:`draft_lengths` replaces
        :meth:`plan_drafts`. The answer must depend on earlier steps only.

        Args:
            requests: the requests of the step, without offers.
        """
        return True

    def looked_for_offers(self, seconds: float) -> None:  # noqa: B027
        """Learn how long looking for continuations took, after :meth:`plan_drafts`.

        It is called only where :meth:`adds_offers` is asked.
        """

    def skip_drafts(self, requests: Sequence[RequestState]) -> None:
        """Begin a step without drafts, because :meth:`looks_for_offers` was answered with no.

        Args:
            requests: the requests of the step, without offers.
        """
        self.draft_lengths(requests)

    def plan_drafts(self, requests: Sequence[RequestState]) -> list[DraftChoice]:
        """Choose the source and the maximum length of each request's draft.

        It replaces :meth:`draft_lengths` in a step in which some requests have an offer. An offer
        has no random part. So a choice between offer and draft model may look at the offer's
        estimates, but never at what the draft model draws.

        By default the source with the larger expected number of accepted tokens is chosen. That of
        the draft model is estimated from the request's history.
        """
        lengths = self.draft_lengths(requests)
        return [
            DraftChoice(length, not request.has_model or _offers_more(request, length))
            for request, length in zip(requests, lengths, strict=True)
        ]

    def may_stop_drafting(self) -> bool:
        """Whether :meth:`keep_drafting` may stop a draft in this step."""
        return type(self).keep_drafting is not Policy.keep_drafting

    def draft_rule(self) -> DraftRule | None:
        """The decisions of :meth:`keep_drafting` in this step as numbers; ``None`` if impossible.

        A backend that applies the rule does not call :meth:`keep_drafting`.
        """
        return None

    def reads_offers(self) -> bool:
        """Whether :meth:`select` reads the distributions of offered tokens in a draft.

        Otherwise they are not written beside those of a draft model.
        """
        return False

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Which requests continue drafting: ``[active]`` bool, or ``None`` for all."""
        return None

    def is_reproducible(self, request: int) -> bool:
        """Whether the decisions about a request of the step depend on that request alone."""
        return not self.needs_latency

    def branches(self, requests: Sequence[RequestState]) -> bool:
        """Whether the drafts of the coming step are token trees. Otherwise they are chains.

        It is asked before all else where trees can be drafted and verified. The answer must depend
        on earlier steps only.

        Args:
            requests: the requests of the step.
        """
        return True

    def max_tree_nodes(self, requests: Sequence[RequestState]) -> list[int]:
        """Maximum number of nodes of each request's token tree, before anything is drafted.

        It is asked after :meth:`looks_for_offers`.
        """
        return [min(self.num_speculative_tokens, request.draft_limit) for request in requests]

    def least_node_value(self, request: int, num_nodes: int) -> float:
        """The probability to be accepted below which a node of a token tree is not worth verifying.

        It is asked before the children of a level are drawn. For trees that are not drawn, it
        decides what another level is expected to gain.

        Args:
            request: index of the tree's request in the step's batch.
            num_nodes: number of nodes of the whole batch so far.
        """
        return 0.0

    def grow_trees(self, level: TreeLevel) -> NDArray[np.bool_] | None:
        """Which nodes of token trees get children: ``[nodes]``, or ``None`` for all of them.

        It is asked before each pass of the draft model after the first one. The answer may depend
        on all that was drafted, as the children are not drawn yet.
        """
        return None

    def wants_companion(self) -> bool:
        """Whether the companion scores this step's draft. It must not depend on the draft.

        It is asked before the draft, too, if token trees are drafted.
        """
        return self.needs_companion

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the drafted tokens to verify; all of them by default."""
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:  # noqa: B027
        """Learn from the acceptance decisions of a step."""

    def forget(self, request_ids: Collection[int]) -> None:  # noqa: B027
        """Delete the state of ended requests."""

    @property
    def calibration_error(self) -> float | None:
        """Recent error of its acceptance estimates; ``None`` if it makes none."""
        return None


def _offers_more(request: RequestState, length: int) -> bool:
    """Whether more tokens of an offer are expected to be accepted than of the draft model's."""
    offered: float = sum(accumulate(request.offer[:length], mul))
    return offered > expected_accepted(request.history, length)
