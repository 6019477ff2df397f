"""The interface of a policy: it sees numbers and returns lengths.

A policy is asked in every step, in this order:

1. :meth:`Policy.draft_lengths`: how many tokens to draft at most, for each request.
2. :meth:`Policy.keep_drafting`: after each drafted token, who goes on.
3. :meth:`Policy.wants_judgement`: whether the companion shall judge the draft.
4. :meth:`Policy.select`: which drafted tokens the target verifies, and from which proposals q′.
5. :meth:`Policy.observe`: what became of it, and how long it took.

The output stays the target's as long as a decision about a position uses nothing that was drawn at
or after that position, or else reports the filtered proposal it amounts to (see
:mod:`draftwise.core.rejection`). A position is either cut (q′ = 0) or filtered (q′ = q·keep) by
what precedes it; which of the two must not depend on the token drawn there. Whether the companion
is asked may depend on earlier steps only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from draftwise.core.types import Draft, DraftRule, Judgement, Outcome, Plan, StepTimes

if TYPE_CHECKING:
    from draftwise.core.latency import LatencyModel
    from draftwise.estimators.profile import AcceptanceProfile


class Signal(StrEnum):
    """What a policy looks at."""

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


class RequestState(NamedTuple):
    """What a policy knows of a request before a step.

    Attributes:
        num_tokens: tokens so far, prompt and output.
        num_output_tokens: tokens generated so far.
        draft_limit: most tokens that may be drafted (room in the output and in the contexts);
            0 while the prompt is being processed.
        request_id: unique number.
        greedy: whether it is decoded at temperature 0.
        history: mean acceptance probability of its recent tokens, 0 … 1.
        policy: name of the policy that it asks for, ``None`` for the engine's.
    """

    num_tokens: int
    num_output_tokens: int
    draft_limit: int
    request_id: int = 0
    greedy: bool = False
    history: float = 0.5
    policy: str | None = None


@dataclass(frozen=True)
class DraftPosition:
    """The token just drafted, for the requests that are still drafting.

    The signals are there only if the policy uses any of the draft's.

    Attributes:
        index: position in the draft, from 0.
        requests: index of each of the ``active`` requests in the step's batch.
        tokens: ``[active]`` int64, the token drawn.
        beliefs: ``[active, vocab]`` float32, what the draft thinks of the position: q, and for
            greedy requests the distribution at temperature 1.
        entropy: ``[active]`` float32, H of the beliefs in nats.
        token_probs: ``[active]`` float32, the belief in the token drawn.
        agreement: ``[active]`` float32, what the target would do with it: for policies that are
            judged by the target.
    """

    index: int
    requests: Sequence[int]
    tokens: Tensor
    beliefs: Tensor | None
    entropy: Tensor | None
    token_probs: Tensor | None
    agreement: Tensor | None = None

    def judged(self, agreement: Tensor) -> DraftPosition:
        """The same with what the target would do with the tokens, ``[active]`` float32."""
        return replace(self, agreement=agreement)


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is made from, beside its options.

    Attributes:
        num_speculative_tokens: most tokens drafted per step.
        latency: what steps cost on this machine; ``None`` in tests of policies that do not ask.
        profile: what was learnt about acceptance for these models; ``None`` for none.
        has_companion: whether a companion is there to judge.
        has_draft: whether a draft model is there.
        for_studies: whether the target may be asked beforehand.
    """

    num_speculative_tokens: int
    latency: LatencyModel | None = None
    profile: AcceptanceProfile | None = None
    has_companion: bool = False
    has_draft: bool = True
    for_studies: bool = False

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What the profile has learnt, by estimator; nothing without a profile."""
        return {} if self.profile is None else self.profile.parameters


class Policy(ABC):
    """Decides when to stop drafting and what to verify.

    Attributes:
        name: what users call it.
        summary: one line for listings.
        source: where the method was published.
        signals: what it looks at.
        lossless: whether the output keeps exactly the target's distribution.
        needs_draft: whether it uses a draft model at all.
        needs_companion: whether it cannot do without a companion.
        needs_profile: whether it cannot do without an acceptance profile.
        needs_latency: whether it prices its choices and so must know what steps cost.
        judged_by_target: the companion is the target itself and costs nothing: for studies only.
        filters: whether it may leave out a token because of what the token is, with a filtered
            proposal; those that do not only cut, by what was known before.
        replaces_tokens: whether it may put tokens of its own in the place of drafted ones.
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
    judged_by_target: ClassVar[bool] = False
    filters: ClassVar[bool] = False
    replaces_tokens: ClassVar[bool] = False

    def __init__(self, context: PolicyContext) -> None:
        self.num_speculative_tokens = context.num_speculative_tokens

    def uses_draft_signals(self) -> bool:
        """Whether the draft's own signals are to be computed."""
        return bool(self.signals & (_OF_THE_DRAFT | _OF_THE_COMPANION))

    @classmethod
    def uses_companion(cls) -> bool:
        """Whether a companion, if there is one, is of any use to it."""
        return bool(cls.signals & _OF_THE_COMPANION) or cls.needs_companion

    @abstractmethod
    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Most tokens to draft for each request, at most its ``draft_limit``."""

    def asks_while_drafting(self) -> bool:
        """Whether :meth:`keep_drafting` may say anything in this step."""
        return type(self).keep_drafting is not Policy.keep_drafting

    def draft_rule(self) -> DraftRule | None:
        """What :meth:`keep_drafting` would say in this step, as numbers; ``None`` if it cannot.

        Whoever follows the rule does not ask.
        """
        return None

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Who goes on drafting: ``[active]`` bool, or ``None`` for all."""
        return None

    def wants_judgement(self) -> bool:
        """Whether the companion shall judge this step's draft; may not look at the draft."""
        return self.needs_companion

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """Which drafted tokens to verify; all of them unless a policy says otherwise."""
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:  # noqa: B027
        """Learn from what the target made of the plan."""

    def forget(self, request_ids: Collection[int]) -> None:  # noqa: B027
        """Requests that ended."""

    @property
    def calibration_error(self) -> float | None:
        """How far its estimates of acceptance are off, lately; ``None`` if there are none."""
        return None
