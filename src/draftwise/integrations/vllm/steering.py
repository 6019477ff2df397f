"""A policy at work in an engine that drafts, verifies and accepts by itself.

The engine says what it drafted and what became of it; the policy says when to stop and how much to
send. Nothing here knows of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftwise.core.history import AcceptanceHistory
from draftwise.core.latency import LatencyModel, StageCost
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.types import Draft, DraftSignals, Judgement, StepTimes
from draftwise.integrations.vllm.steps import Member, Sent, Settled, Verified
from draftwise.policies.base import DraftPosition, Policy, RequestState
from draftwise.policies.priced import PricedPolicy

Decision = TypeVar("Decision")
# Asks a companion about a draft: gives what it thinks, and the seconds it took.
Ask = Callable[[Draft], tuple[Judgement, float]]


class Agree(Protocol):
    """Gives all processes that work together the same decision."""

    def __call__(self, decision: Decision) -> Decision:
        """What is to be done; called by all of them alike."""


def _as_it_is(decision: Decision) -> Decision:
    return decision


class Steering:
    """Drives a policy through the steps of another engine.

    In every step: :meth:`settle` with what became of the last one, :meth:`begin`, :meth:`drawn`
    after each drafted token as long as it says so, and :meth:`finish`.

    Attributes:
        policy: that decides.
        sent: the step that :meth:`settle` is to be told of; ``None`` if there is none.
    """

    def __init__(
        self,
        policy: Policy,
        latency: LatencyModel | None,
        agree: Agree = _as_it_is,
    ) -> None:
        """Set up.

        Args:
            policy: that decides.
            latency: follows what passes cost; ``None`` if the policy does not ask.
            agree: gives all processes that work together the decision of one of them, since each
                measures times of its own.
        """
        self.policy = policy
        self.sent: Sent | None = None
        self._latency = latency
        self._agree = agree
        self._histories: dict[str, AcceptanceHistory] = {}
        self._numbers: dict[str, int] = {}
        self._num_seen = 0
        self._members: list[Member] = []
        self._limits: list[int] = []
        self._going: list[bool] = []
        self._lengths: list[int] = []
        self._tokens: list[Tensor] = []
        self._beliefs: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._token_probs: list[Tensor] = []

    def restart_costs(
        self, target: StageCost, draft: StageCost, companion: StageCost | None
    ) -> None:
        """Passes were measured; before the first step."""
        if self._latency is not None:
            self._latency.restart(target, draft, companion)

    def settle(
        self, verified: dict[str, Verified], seconds: float, num_prompt_tokens: int
    ) -> Settled | None:
        """What became of the step before.

        Args:
            verified: by request; those that are missing ended, or were put aside.
            seconds: from the beginning of its draft to that of the next one.
            num_prompt_tokens: that the target processed beside.

        Returns:
            What the step was; ``None`` if there was none.
        """
        sent, self.sent = self.sent, None
        if sent is None:
            return None
        fates = sent.became(verified)
        for member, fate in zip(sent.members, fates, strict=True):
            if fate is not None:
                seen = [1.0] * fate.num_accepted + [0.0] * (fate.num_sent > fate.num_accepted)
                self._histories[member.name].learn(seen)
        outcome = sent.outcome(fates)
        others = bool(outcome.failed) or len(verified) != len(sent.members)
        times = sent.times(seconds, num_prompt_tokens, others)
        if times.is_typical and times.verify > 0:
            self._learn_costs(sent, outcome.num_verified, times)
        self.policy.observe(outcome, times)
        return sent.settled(outcome, times)

    def begin(self, members: Sequence[Member]) -> int:
        """Begin a step: how many tokens to draft at most, for anybody."""
        self._members = list(members)
        ended = self._histories.keys() - {member.name for member in members}
        self.policy.forget([self._numbers[name] for name in ended])
        for name in ended:
            del self._histories[name], self._numbers[name]
        states = [self._state(member) for member in members]
        lengths = self.policy.draft_lengths(states)
        self._limits = self._agree(
            [min(n, state.draft_limit) for n, state in zip(lengths, states, strict=True)]
        )
        self._going = [limit > 0 for limit in self._limits]
        self._lengths = [0] * len(members)
        self._tokens, self._beliefs, self._entropy, self._token_probs = [], [], [], []
        return max(self._limits, default=0)

    @property
    def wants_beliefs(self) -> bool:
        """Whether this step needs to know how sure the draft is."""
        return self.policy.uses_draft_signals()

    def drawn(self, tokens: Tensor, beliefs: Tensor | None) -> bool:
        """One more token was drafted for everybody; whether to go on for anybody.

        Args:
            tokens: ``[batch]``.
            beliefs: ``[batch, vocab]`` float32 what the draft thinks of the position; needed if
                :attr:`wants_beliefs`.
        """
        index = len(self._tokens)
        tokens = tokens.long()
        self._tokens.append(tokens)
        if beliefs is not None:
            self._beliefs.append(beliefs)
            self._entropy.append(entropy(beliefs))
            self._token_probs.append(token_probabilities(beliefs, tokens))
        active = [at for at, goes in enumerate(self._going) if goes]
        for at in active:
            self._lengths[at] += 1
        going = [True] * len(active)
        if active and self.policy.asks_while_drafting():
            wanted = self.policy.keep_drafting(self._position(index, active))
            if wanted is not None:
                going = wanted.tolist()
        for at, goes in zip(active, self._agree(going), strict=True):
            self._going[at] = goes and self._limits[at] > index + 1
        return any(self._going)

    def finish(
        self, ask: Ask | None, clock: Callable[[], float], draft_seconds: float
    ) -> list[int]:
        """How many leading tokens of each request to send.

        Args:
            ask: the companion; ``None`` if there is none.
            clock: seconds.
            draft_seconds: that drafting took.
        """
        draft = self._draft()
        wants = any(draft.lengths) and self._agree(self.policy.wants_judgement())
        judgement, companion_seconds = None, 0.0
        if wants and ask is not None:
            judgement, companion_seconds = ask(draft)
        began = clock()
        plan = self.policy.select(draft, judgement)
        select_seconds = clock() - began
        lengths = self._agree(plan.lengths)
        self.sent = Sent(
            self._members,
            draft.lengths,
            lengths,
            draft.signals is not None,
            judgement is not None,
            draft_seconds,
            companion_seconds,
            select_seconds,
            self._expected(lengths),
        )
        return list(lengths)

    def _expected(self, lengths: Sequence[int]) -> list[float] | None:
        """Tokens of each request that the policy expects to be accepted, if it expects anything."""
        if not isinstance(self.policy, PricedPolicy) or not self._beliefs:
            return None
        reach = np.cumprod(self.policy.believed, axis=1)
        return [float(reach[row, :length].sum()) for row, length in enumerate(lengths)]

    def _state(self, member: Member) -> RequestState:
        if member.name not in self._histories:
            self._histories[member.name] = AcceptanceHistory()
            self._numbers[member.name] = self._num_seen
            self._num_seen += 1
        return RequestState(
            member.num_tokens,
            member.num_output_tokens,
            member.room,
            self._numbers[member.name],
            member.greedy,
            self._histories[member.name].mean,
        )

    def _position(self, index: int, active: list[int]) -> DraftPosition:
        def rows(values: list[Tensor]) -> Tensor | None:
            if not values:
                return None
            return values[-1] if len(active) == len(self._members) else values[-1][active]

        tokens = rows(self._tokens)
        assert tokens is not None
        return DraftPosition(
            index,
            active,
            tokens,
            rows(self._beliefs),
            rows(self._entropy),
            rows(self._token_probs),
        )

    def _draft(self) -> Draft:
        """All that was drafted, without what was drawn for those that had ended.

        Without proposals: who accepts here keeps them itself, and knows of none that are filtered.
        """
        width, count = len(self._tokens), len(self._members)
        lengths = tuple(self._lengths)
        if not width:
            return Draft(torch.zeros(count, 0, dtype=torch.long), lengths, None, ())
        tokens = torch.stack(self._tokens, dim=1)
        drafted = torch.from_numpy(np.arange(width) < np.array(lengths)[:, None]).to(tokens.device)
        signals = None
        if self._beliefs:
            beliefs = torch.stack(self._beliefs, dim=1) * drafted.unsqueeze(2)
            signals = DraftSignals(
                beliefs,
                torch.stack(self._entropy, dim=1) * drafted,
                torch.stack(self._token_probs, dim=1) * drafted,
            )
        return Draft(tokens * drafted, lengths, None, tuple(range(-1, width - 1)), signals)

    def _learn_costs(self, sent: Sent, lengths: Sequence[int], times: StepTimes) -> None:
        if self._latency is None:
            return
        # What looking at a draft takes, and irregular rows, are no reason to think that all passes
        # became slower.
        if not sent.watched:
            context = sum(member.num_tokens for member in sent.members)
            self._latency.observe_target(len(lengths) + sum(lengths), context, times.verify)
            # A pass of the draft is for everybody, however few still draft.
            counts = [len(sent.members)] * max(sent.num_drafted, default=0)
            self._latency.observe_draft(counts, times.draft)
        if sent.judged:
            self._latency.observe_companion(sum(sent.num_drafted), times.companion)
