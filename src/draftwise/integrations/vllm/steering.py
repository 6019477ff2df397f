"""A policy in an engine that drafts, verifies and accepts by itself.

The engine reports drafted tokens and verification results. The policy decides when drafting stops
and how many tokens are verified. Drafts come from a draft model, from continuations of the
requests' own texts, or from both. This module is independent of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import CompanionScores, Draft, DraftSignals, StepTimes
from draftwise.engine.drafting.loop import DraftProgress, answer
from draftwise.engine.proposers.proposals import Proposals, planned_lengths, stopped_draft
from draftwise.integrations.vllm.agreement import Agreement, Alone
from draftwise.integrations.vllm.steps import PendingStep, RequestView, StepResult, Verified
from draftwise.integrations.vllm.text_drafts import TextProposer, Texts, joined
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.inputs import AcceptanceHistory, DraftPosition, RequestState

# Runs the companion's passes over a draft. Returns the function that computes the scores from them.
ScoreDraft = Callable[[Draft], Callable[[], CompanionScores]]
# Reads the texts of a step's requests.
ReadTexts = Callable[[], Texts]


class Steering:
    """Drives a policy through the steps of another engine.

    The engine calls, in every step, :meth:`end_step` with the results of the previous step. Then
    it calls :meth:`begin`, :meth:`drawn` after each token that the draft model draws until it
    returns false, and :meth:`finish`.

    Continuations of texts are known before the draft model draws anything, and the policy chooses
    between them and the draft model for each request. It never sees a token that is drawn at
    random before it chooses. Continuations are verified as proposals that are certain.

    Of several processes that run one model, one leads. The others run the same passes and take its
    decisions. They neither ask their policies nor report to them.

    Attributes:
        policy: the policy.
        copies: the continuations that this step drafts, by the index of their requests.
        pending: the step that waits for :meth:`end_step`; ``None`` if there is none.
    """

    def __init__(
        self,
        policy: Policy,
        latency: LatencyModel | None,
        agree: Agreement | None = None,
        proposer: TextProposer | None = None,
        vocab_size: int = 0,
        has_model: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Set up.

        Args:
            policy: the policy.
            latency: cost model of the passes, which learns from every step; ``None`` if the policy
                needs none.
            agree: makes decisions equal on all processes that run one model; ``None`` for one
                process.
            proposer: continues texts; ``None`` if only the draft model drafts. Beside a draft
                model it must estimate the acceptance of its tokens.
            vocab_size: the target's vocabulary size; needed with a proposer.
            has_model: whether a draft model drafts.
            clock: the time in seconds.
        """
        self.policy = policy
        self.copies: Mapping[int, list[int]] = {}
        self.pending: PendingStep | None = None
        self._latency = latency
        self._agree = agree or Alone()
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._has_model = has_model
        self._clock = clock
        # A policy treats tokens without estimates like those of a draft model.
        estimates = proposer is not None and proposer.estimates_acceptance
        self._counts_as_model = has_model or not estimates
        self._histories: dict[str, AcceptanceHistory] = {}
        self._numbers: dict[str, int] = {}
        self._num_seen = 0
        self._wants_scores = False
        self._looking_seconds = 0.0
        self._views: list[RequestView] = []
        self._made: Proposals | None = None
        self._copied: list[int] = []
        self._progress = DraftProgress(())
        self._tokens: list[Tensor] = []
        self._draft_probs: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._token_probs: list[Tensor] = []

    def restart_costs(
        self, target: StageCost, draft: StageCost | None, companion: StageCost | None
    ) -> None:
        """Set the measured costs of passes before the first step."""
        if self._latency is not None:
            self._latency.restart(target, draft, companion)

    def end_step(
        self, verified: dict[str, Verified], seconds: float, num_prompt_tokens: int
    ) -> StepResult | None:
        """Report the results of the pending step to the policy.

        Args:
            verified: results by request. Requests that ended or were preempted are missing.
            seconds: time from the start of the step's draft to the start of the next one's.
            num_prompt_tokens: prompt tokens in the target's pass.

        Returns:
            The step's result; ``None`` if no step is pending, or if another process leads.
        """
        step, self.pending = self.pending, None
        if step is None:
            return None
        results = step.results(verified)
        if self._proposer is not None and self._made is not None:
            copied = zip(results, self._copied, strict=True)
            self._proposer.learn([each if count else None for each, count in copied])
        if not self._agree.leads:
            return None
        for row, (view, each) in enumerate(zip(step.views, results, strict=True)):
            # The history is about tokens of the draft model, where there is one.
            if each is not None and row not in step.copied:
                rejected = each.num_verified > each.num_accepted
                self._histories[view.name].learn([1.0] * each.num_accepted + [0.0] * rejected)
        outcome = step.outcome(results)
        shared = bool(outcome.failed) or len(verified) != len(step.views)
        times = step.times(seconds, num_prompt_tokens, shared)
        if times.is_typical and times.verify > 0:
            self._learn_costs(step, outcome.num_verified, times)
        self.policy.observe(outcome, times)
        return step.result(outcome, times)

    def begin(self, views: Sequence[RequestView], read_texts: ReadTexts | None = None) -> int:
        """Begin a step.

        Args:
            views: the requests of the step.
            read_texts: reads their texts; needed with a proposer.

        Returns:
            Maximum number of tokens to draft for any request with the draft model.
        """
        states = self._states(views)
        self._made, self._copied, self.copies = None, [0] * len(views), {}
        self._looking_seconds = 0.0
        proposer = self._proposer
        if proposer is None or not self._agree(lambda: self._looks(proposer, states)):
            limits = self._agree(lambda: self._policy_lengths(states))
        else:
            assert read_texts is not None
            start = self._clock()
            made = self._made = proposer.propose(read_texts(), views)
            made.cut_at_vocabulary(self._vocab_size)
            self._copied, limits = self._agree(lambda: self._plan(proposer, states, made, start))
            rows = [row for row, count in enumerate(self._copied) if count]
            self.copies = {row: made.tokens[row, : self._copied[row]].tolist() for row in rows}
        self._progress = DraftProgress(limits)
        self._tokens, self._draft_probs, self._entropy, self._token_probs = [], [], [], []
        return self._progress.longest

    def _looks(self, proposer: TextProposer, states: Sequence[RequestState]) -> bool:
        """Whether continuations are looked for in this step."""
        if not self._has_model and not proposer.estimates_acceptance:
            return True
        return self.policy.looks_for_offers(states)

    def _policy_lengths(self, states: Sequence[RequestState]) -> list[int]:
        """The policy's draft lengths, within each request's limit."""
        plan = planned_drafts(self.policy, states)
        self._wants_scores = bool(plan.scored)
        return list(plan.lengths)

    def _plan(
        self,
        proposer: TextProposer,
        states: Sequence[RequestState],
        made: Proposals,
        start: float,
    ) -> tuple[list[int], list[int]]:
        """Tokens of each request that are copied, and at most drawn by the draft model.

        Args:
            proposer: made the proposals.
            states: the requests.
            made: their continuations.
            start: when the search began, in seconds.
        """
        if not self._has_model:
            if proposer.estimates_acceptance:
                lengths = planned_lengths(made, states, self.policy)
            else:
                wanted = zip(self._policy_lengths(states), made.lengths.tolist(), strict=True)
                lengths = [min(each) for each in wanted]
            host = torch.device("cpu")
            draft = stopped_draft(made, lengths, self.policy, self._vocab_size, host, None)
            return list(draft.lengths), [0] * len(states)
        # The engine's draft model reads every token, so none of its requests is behind.
        offered = [
            state._replace(offer=offer, has_model=state.draft_limit > 0)
            for state, offer in zip(states, made.offers(), strict=True)
        ]
        chosen, copies, scored = planned_drafts(self.policy, offered)
        assert copies is not None
        self._wants_scores = bool(scored)
        self._looking_seconds = self._clock() - start
        pairs = list(zip(chosen, copies, strict=True))
        return (
            [length if is_copied else 0 for length, is_copied in pairs],
            [0 if is_copied else length for length, is_copied in pairs],
        )

    @property
    def wants_draft_probs(self) -> bool:
        """Whether the policy of this process uses the draft's distributions in this step."""
        return self._agree.leads and self.policy.uses_draft_signals

    def drawn(self, tokens: Tensor, draft_probs: Tensor | None) -> bool:
        """Record one more drafted token of every request and get the policy's decision.

        Args:
            tokens: ``[batch]`` token ids.
            draft_probs: ``[batch, vocab]`` float32 distributions of the draft that the tokens were
                drawn from; required if :attr:`wants_draft_probs`.

        Returns:
            Whether any request continues drafting.
        """
        index = len(self._tokens)
        tokens = tokens.long()
        self._tokens.append(tokens)
        if draft_probs is not None:
            self._draft_probs.append(draft_probs)
            self._entropy.append(entropy(draft_probs))
            self._token_probs.append(token_probabilities(draft_probs, tokens))
        active = self._progress.active

        def wanted() -> list[bool] | None:
            if active and self.policy.may_stop_drafting:
                return answer(self.policy, self._position(index, active))
            return None

        self._progress.advance(self._agree(wanted))
        return bool(self._progress.active)

    def finish(self, score: ScoreDraft | None, draft_seconds: float) -> list[int]:
        """Select how many leading drafted tokens of each request to verify.

        Args:
            score: scores the draft with the companion; ``None`` without a companion.
            draft_seconds: time that drafting took.
        """
        draft = self._draft()
        companion_scores, companion_seconds, select_seconds = None, 0.0, 0.0
        wants = score is not None and any(draft.lengths)
        scored = wants and self._agree(lambda: self._wants_scores)
        if scored and score is not None:
            start = self._clock()
            compute_scores = score(draft)
            if self._agree.leads:
                companion_scores = compute_scores()
                companion_seconds = self._clock() - start

        def select() -> Sequence[int]:
            nonlocal select_seconds
            start = self._clock()
            lengths = self.policy.select(draft, companion_scores).lengths
            select_seconds = self._clock() - start
            return lengths

        lengths = list(self._agree(select))
        num_passes = max(self._progress.lengths, default=0)
        self.pending = PendingStep(
            self._views,
            draft.lengths,
            tuple(lengths),
            num_passes,
            num_passes > 0 and draft.signals is not None,
            scored and self._agree.leads,
            draft_seconds,
            companion_seconds,
            select_seconds,
            frozenset(self.copies if self._has_model else ()),
            self._made is not None,
            self._looking_seconds,
        )
        return lengths

    def _states(self, views: Sequence[RequestView]) -> list[RequestState]:
        """Begin a step with these requests. All others have ended or were preempted."""
        self._views = list(views)
        ended = self._histories.keys() - {view.name for view in views}
        if self._agree.leads:
            self.policy.forget([self._numbers[name] for name in ended])
        for name in ended:
            del self._histories[name], self._numbers[name]
        return [self._state(view) for view in views]

    def _state(self, view: RequestView) -> RequestState:
        if view.name not in self._histories:
            self._histories[view.name] = AcceptanceHistory()
            self._numbers[view.name] = self._num_seen
            self._num_seen += 1
        return RequestState(
            view.num_tokens,
            view.num_output_tokens,
            view.room,
            self._numbers[view.name],
            view.greedy,
            self._histories[view.name].mean,
            has_model=self._counts_as_model,
        )

    def _position(self, index: int, active: list[int]) -> DraftPosition:
        def rows(values: list[Tensor]) -> Tensor | None:
            if not values:
                return None
            return values[-1] if len(active) == len(self._views) else values[-1][active]

        tokens = rows(self._tokens)
        assert tokens is not None
        return DraftPosition(
            index,
            active,
            tokens,
            rows(self._draft_probs),
            rows(self._entropy),
            rows(self._token_probs),
        )

    def _draft(self) -> Draft:
        """The tokens that the draft model drew, and the continuations."""
        draft, made = self._drawn_draft(), self._made
        if made is None or not any(self._copied):
            return draft
        signals = self.wants_draft_probs
        copied = made.draft(self._copied, self._vocab_size, draft.tokens.device, None, signals)
        if not any(draft.lengths):
            return copied
        return joined(draft, copied, self._agree.leads and self.policy.reads_offers)

    def _drawn_draft(self) -> Draft:
        """The draft of the model, without tokens that were drawn after a request's draft had ended.

        It has no proposal distributions. The other engine keeps its own for its rejection sampler.
        """
        width, count = len(self._tokens), len(self._views)
        lengths = tuple(self._progress.lengths)
        if not width:
            return Draft.empty(count, torch.device("cpu"))
        tokens = torch.stack(self._tokens, dim=1)
        drafted = torch.from_numpy(np.arange(width) < np.array(lengths)[:, None]).to(tokens.device)
        signals = None
        if self._draft_probs:
            draft_probs = torch.stack(self._draft_probs, dim=1) * drafted.unsqueeze(2)
            signals = DraftSignals(
                draft_probs,
                torch.stack(self._entropy, dim=1) * drafted,
                torch.stack(self._token_probs, dim=1) * drafted,
            )
        return Draft(tokens * drafted, lengths, None, signals)

    def _learn_costs(self, step: PendingStep, lengths: Sequence[int], times: StepTimes) -> None:
        if self._latency is None:
            return
        self._latency.observe_step(
            num_target_tokens=len(lengths) + sum(lengths),
            context=sum(view.num_tokens for view in step.views),
            # vLLM runs the draft for the whole batch, even where few requests still draft.
            drafting=() if step.looked_for_copies else [len(step.views)] * step.num_passes,
            num_scored=sum(step.num_drafted) if step.scored else 0,
            has_signals=step.has_signals,
            target_seconds=times.verify,
            draft_seconds=times.draft,
            companion_seconds=times.companion,
        )
