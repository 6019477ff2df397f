"""The interface of a policy, which gets numbers and returns lengths.

In every step the engine calls a policy's methods in this order:

1. :meth:`Policy.draft_lengths`: returns the maximum draft length of each request. A proposer that
   knows continuations before anything is drafted calls :meth:`Policy.plan_drafts` instead.
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.draft_length import expected_accepted
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.policies.inputs import DraftPosition, RequestState, TreeLevel

if TYPE_CHECKING:
    from draftwise.core.latency import LatencyModel
    from draftwise.estimators.profile import AcceptanceProfile
    from draftwise.policies.guard import Guard


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


class DraftChoice(NamedTuple):
    """What is drafted for one request.

    Attributes:
        length: maximum number of drafted tokens.
        uses_offer: whether the tokens are those of the offer. Otherwise the draft model writes
            them.
    """

    length: int
    uses_offer: bool


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
        guarded: whether a guard shortens what a policy wants to draft.
    """

    num_speculative_tokens: int
    latency: LatencyModel | None = None
    profile: AcceptanceProfile | None = None
    has_companion: bool = False
    has_draft: bool = True
    for_studies: bool = False
    drafts_trees: bool = False
    guarded: bool = False

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
        asks_guard: whether it drafts nothing that the guard does not afford.
        scores_offers: whether it lets a companion score continuations of which the acceptance is
            estimated before anything is drafted.
        guard: estimates step times; ``None`` without step costs.
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
    asks_guard: ClassVar[bool] = False
    scores_offers: ClassVar[bool] = True

    guard: Guard | None = None

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

        If the answer is no, the step is one of the draft model alone, and :meth:`draft_lengths`
        replaces :meth:`plan_drafts`. The answer must depend on earlier steps only.

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

    def reads_offers(self) -> bool:
        """Whether :meth:`select` reads the distributions of offered tokens in a draft.

        Otherwise they are not written beside those of a draft model.
        """
        return False

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Which requests continue drafting: ``[active]`` bool, or ``None`` for all."""
        return None

    def max_tree_nodes(self, requests: Sequence[RequestState]) -> list[int]:
        """Maximum number of nodes of each request's token tree, before anything is drafted.

        It is asked after :meth:`looks_for_offers`.
        """
        return [min(self.num_speculative_tokens, request.draft_limit) for request in requests]

    def grow_trees(self, level: TreeLevel) -> NDArray[np.bool_] | None:
        """Which nodes of token trees get children: ``[nodes]``, or ``None`` for all of them.

        It is asked before each pass of the draft model after the first one. The answer may depend
        on all that was drafted, as nodes are proposed with certainty.
        """
        return None

    def wants_companion(self) -> bool:
        """Whether the companion scores this step's draft. It must not depend on the draft."""
        return self.needs_companion

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the drafted tokens to verify; all of them by default."""
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:  # noqa: B027
        """Learn from the acceptance decisions of a step."""

    @property
    def learns(self) -> bool:
        """Whether its decisions depend on the outcomes of earlier steps."""
        return type(self).observe is not Policy.observe

    def forget(self, request_ids: Collection[int]) -> None:  # noqa: B027
        """Delete the state of ended requests."""


def _offers_more(request: RequestState, length: int) -> bool:
    """Whether more tokens of an offer are expected to be accepted than of the draft model's."""
    offered: float = sum(accumulate(request.offer[:length], mul))
    return offered > expected_accepted(request.history, length)
