"""The interface of a policy, which gets numbers and returns lengths.

In every step the engine calls a policy's methods in this order:

1. :meth:`Policy.looks_for_offers`: whether continuations of the texts are looked for. It is asked
   only where there are texts to continue.
2. :meth:`Policy.plan_drafts`: the maximum draft length of each request, and its source.
3. :meth:`Policy.keep_drafting`: after each drafted token, which requests continue; in token trees,
   which nodes get children.
4. :meth:`Policy.select`: the drafted tokens to verify, and their proposals q′.
5. :meth:`Policy.observe`: learns from the acceptance decisions and the step's times.

The output keeps the target's distribution if each decision about a position satisfies one of two
conditions. Either it uses nothing that was drawn at or after that position. Or the policy returns
the filtered proposal that the decision implies (see :mod:`draftwise.core.rejection`). A position is
either cut (q′ = 0) or filtered (q′ = q·keep), based on the tokens before it. The choice between the
two must not depend on the token drawn there. Whether the companion scores the draft may only depend
on earlier steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from draftwise.core.draft_length import expected_accepted
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.policies.inputs import DraftPosition, RequestState

if TYPE_CHECKING:
    from draftwise.core.latency import LatencyModel
    from draftwise.estimators.profile import AcceptanceProfile
    from draftwise.policies.guard import Guard


class Signal(StrEnum):
    """A kind of information that a policy uses."""

    ENTROPY = "H"
    TOKEN_PROBABILITY = "q(x)"
    CONFIDENCE = "confidence"
    OVERLAP = "S"
    AGREEMENT = "A"
    HISTORY = "history"
    POSITION = "position"
    LOAD = "load"
    TARGET = "target"


_OF_THE_DRAFT = {Signal.ENTROPY, Signal.TOKEN_PROBABILITY, Signal.CONFIDENCE}
_OF_THE_COMPANION = {Signal.OVERLAP, Signal.AGREEMENT}


class DraftPlan(NamedTuple):
    """What is drafted in a step.

    Attributes:
        lengths: ``[batch]`` maximum number of drafted tokens; in token trees, of nodes.
        copies: ``[batch]`` whether the tokens are those of the request's offer. Otherwise the draft
            model writes them. ``None`` takes the source that is expected to gain more.
        scored: whether the companion scores the draft; ``None`` if ``needs_companion``.
    """

    lengths: Sequence[int]
    copies: Sequence[bool] | None = None
    scored: bool | None = None


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


class Policy:
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
        reads_offers: whether :meth:`select` reads the distributions of offered tokens in a draft.
            Otherwise they are not written beside those of a draft model.
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
    scores_offers: ClassVar[bool] = True

    reads_offers: bool = False
    guard: Guard | None = None

    def __init__(self, context: PolicyContext) -> None:
        self.num_speculative_tokens = context.num_speculative_tokens

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether continuations are looked for in this step. It must not depend on them.

        Looking takes time, which a policy may save. Beside a draft model, the answer must depend on
        earlier steps only.

        Args:
            requests: the requests of the step, without offers.
        """
        return True

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """Choose the source and the maximum length of each request's draft; by default γ tokens.

        Lengths beyond a request's limit are cut. An offer has no random part. So a choice between
        offer and draft model may look at the offer's estimates, but never at what the draft model
        draws. Whether the companion scores the draft must not depend on the draft either.
        """
        return DraftPlan([self.num_speculative_tokens] * len(requests))

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Which requests continue drafting: ``[active]`` bool, or ``None`` for all.

        It is asked after each token, and decides about the next position. The token just drawn
        stays in the draft. So the answer may use all that was drawn so far. In token trees of a
        draft model, it decides which nodes get children.
        """
        return None

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the drafted tokens to verify; all of them by default."""
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Learn from the acceptance decisions of a step."""

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""

    # What follows from the above.

    @property
    def uses_draft_signals(self) -> bool:
        """Whether the draft's signals must be computed in this step."""
        return bool(self.signals & (_OF_THE_DRAFT | _OF_THE_COMPANION))

    @classmethod
    def uses_companion(cls) -> bool:
        """Whether the policy makes use of a companion."""
        return bool(cls.signals & _OF_THE_COMPANION) or cls.needs_companion

    @property
    def may_stop_drafting(self) -> bool:
        """Whether :meth:`keep_drafting` may stop a draft in this step."""
        return type(self).keep_drafting is not Policy.keep_drafting

    @property
    def learns(self) -> bool:
        """Whether its decisions depend on the outcomes of earlier steps."""
        return type(self).observe is not Policy.observe


def planned_drafts(policy: Policy, requests: Sequence[RequestState]) -> DraftPlan:
    """A policy's plan, within the limits of the requests and with a source for each of them."""
    lengths, copies, scored = policy.plan_drafts(requests)
    if copies is None:
        copies = [
            not request.has_model or _offers_more(request, min(length, request.draft_limit))
            for request, length in zip(requests, lengths, strict=True)
        ]
    rows = zip(requests, lengths, copies, strict=True)
    lengths = [
        min(length, request.draft_limit)
        if request.has_model and not is_copied
        else min(length, request.draft_limit, len(request.offer))
        for request, length, is_copied in rows
    ]
    return DraftPlan(lengths, copies, policy.needs_companion if scored is None else scored)


def _offers_more(request: RequestState, length: int) -> bool:
    """Whether more tokens of an offer are expected to be accepted than of the draft model's."""
    offered: float = sum(accumulate(request.offer[:length], mul))
    return offered > expected_accepted(request.history, length)
