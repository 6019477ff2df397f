"""Lossless Speculative Verification: a companion scores drafts while this increases goodput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwise.core.types import CompanionScores, Draft, Outcome, Plan
from draftwise.core.types import StepTimes as MeasuredTimes
from draftwise.estimators.combined import Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import DraftPlan, PolicyContext, Signal
from draftwise.policies.filtering import Floats, Integers, keep_likely
from draftwise.policies.guard import Booleans, bucket_key
from draftwise.policies.inputs import RequestState
from draftwise.policies.price import Adaptive, Choice, Copies, reached
from draftwise.policies.step_times import SCORED

# Weight of a scored step in the mean shares of tokens that are kept.
_WEIGHT = 0.1
# Scored steps of a length before its own shares are used in place of the nearest length's.
_FEW_STEPS = 3


class _Kept(NamedTuple):
    """What the selection by scores keeps of a draft, on average over scored steps.

    Attributes:
        verified: share of the drafted tokens.
        accepted: share of the tokens that would be accepted.
        num_steps: number of scored steps.
    """

    verified: float
    accepted: float
    num_steps: int


class SpeculativeVerification(Adaptive):
    """Selects tokens by S, A and the draft's own signals, with filtered proposals.

    It works like ``adaptive``, with further choices: that the companion scores a draft of each
    length. In a step that it scores, the acceptance estimate is P_i = P(accept | S_i, A_i, H_i,
    q_i(x_i), history, i), and a token is verified if Π_{j≤i} P_j reaches the price of a verified
    token. What such steps keep, and what they take, is measured like the other choices. At first
    the scores are taken to be perfect, so they are tried. Whether the companion scores a step is
    decided before the step's draft.

    The published method selects tokens over the whole batch by S and A of the drawn token. This
    biases the output. Here the same signals are compared with a threshold that is known before the
    step, and the comparison is made for every token of the vocabulary.
    """

    name = "sv"
    summary = "as adaptive, and a companion scores the draft while this increases goodput"
    source = "Speculative Verification, made lossless"
    signals = Adaptive.signals | {
        Signal.OVERLAP,
        Signal.AGREEMENT,
        Signal.ENTROPY,
        Signal.TOKEN_PROBABILITY,
        Signal.POSITION,
    }
    filters = True
    scores_offers = False

    def __init__(self, context: PolicyContext) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required. Without a companion
                the policy behaves like ``adaptive``.
        """
        super().__init__(context)
        self.combined = ModelPair.of(Inputs.COMBINED, context.parameters)
        self._has_companion = context.has_companion
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._scored: tuple[Draft, CompanionScores, Floats] | None = None

    def _begin(self, requests: Sequence[RequestState]) -> None:
        super()._begin(requests)
        self._scored = None
        self._greedy = np.array([request.greedy for request in requests], dtype=bool)
        self._history = np.array([request.history for request in requests])

    def _drafts(self, copies: Copies) -> list[Choice]:
        """The choices of ``adaptive``, and each of them with scores."""
        plain = super()._drafts(copies)
        if not self._has_companion:
            return plain
        return [*plain, *map(self._with_scores, plain)]

    def _with_scores(self, choice: Choice) -> Choice:
        """A choice in which the companion scores what the model drafts."""
        size, drafted = len(self._requests), np.where(choice.by_model, choice.lengths, 0)
        gained = np.concatenate([[0.0], self.survival().cumsum()])[drafted]
        kept = self._usually_kept(choice.kind, gained.sum() / drafted.sum())
        rows = size + int(choice.lengths.sum() - (1 - kept.verified) * drafted.sum())
        tokens = choice.tokens - (1 - kept.accepted) * float(gained.sum())
        computed = self._costs.computed_work(rows, drafted, int(drafted.sum()))
        return choice._replace(kind=SCORED + choice.kind, tokens=tokens, computed=computed)

    def _usually_kept(self, length: int, accepted: float) -> _Kept:
        """What scores keep of drafts of a length: as measured, or what perfect scores would."""
        bucket = bucket_key(len(self._requests))
        own = self._kept.get((bucket, length))
        if own is not None and own.num_steps >= _FEW_STEPS:
            return own
        others = [other for size, other in self._kept if size == bucket and other != length]
        if others:
            near = min(others, key=lambda other: abs(other - length))
            return self._kept[bucket, near]
        return own or _Kept(accepted, 1.0, 0)

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The best choice, with or without scores."""
        return super().plan_drafts(requests)._replace(scored=self.uses_draft_signals)

    @property
    def uses_draft_signals(self) -> bool:
        """Whether the companion scores this step."""
        return self._choice.kind >= SCORED

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the tokens whose probability to be accepted reaches the price."""
        if companion_scores is None or not self.uses_draft_signals:
            return Plan(draft.tokens, draft.lengths, draft.probs)
        expected = self._acceptance_of(draft, companion_scores)
        self._scored = draft, companion_scores, expected
        # Copied tokens were selected before.
        thresholds = np.where(self._choice.by_model, self._row_price, 0.0)
        plan = self._keep(draft, companion_scores, expected, thresholds)
        self._learn_shares(draft, expected, plan)
        return plan

    def _keep(
        self, draft: Draft, companion_scores: CompanionScores, expected: Floats, thresholds: Floats
    ) -> Plan:
        """Select tokens to verify in a scored draft.

        Args:
            draft: the draft, with signals.
            companion_scores: the companion's scores of the draft.
            expected: ``[batch, num_tokens]`` acceptance estimates of the drawn tokens.
            thresholds: ``[batch]`` minimum probability to be accepted, known before the step.
        """
        return keep_likely(
            draft, companion_scores, expected, self._log_odds, thresholds, self._greedy
        )

    def _log_odds(
        self,
        draft: Draft,
        companion_scores: CompanionScores | None,
        rows: Integers,
        places: Integers,
    ) -> Tensor:
        """``[n, vocab]`` the estimate for every token at some positions."""
        assert draft.signals is not None
        assert companion_scores is not None
        device = draft.tokens.device
        at = torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)
        return self.combined[False].log_odds_over_vocabulary(
            draft.signals.draft_probs[at],
            draft.signals.entropy[at],
            torch.from_numpy(self._history[rows]).float().to(device),
            at[1],
            companion_scores.probs[at],
        )

    def _acceptance_of(self, draft: Draft, companion_scores: CompanionScores) -> Floats:
        """``[batch, num_tokens]`` acceptance estimates of the drawn tokens from all signals."""
        expected = np.zeros(draft.tokens.shape)
        rows, places = np.nonzero(self._drafted(draft))
        signals = self._signals_of(draft, companion_scores, rows, places)
        expected[rows, places] = self.combined.predict(signals, self._greedy[rows])
        return expected

    def _drafted(self, draft: Draft) -> Booleans:
        """``[batch, num_tokens]`` which tokens the model drafted."""
        drafted = np.arange(draft.tokens.shape[1]) < np.asarray(draft.lengths)[:, None]
        return drafted & self._choice.by_model[:, None]

    def _signals_of(
        self, draft: Draft, companion_scores: CompanionScores, rows: Integers, places: Integers
    ) -> Signals:
        """Signals of the drafted tokens at ``[n]`` positions of ``[n]`` requests."""
        assert draft.signals is not None

        def selected(values: Tensor) -> Floats:
            entries: Floats = values.cpu().double().numpy()[rows, places]
            return entries

        return Signals(
            token_prob=selected(draft.signals.token_probs),
            entropy=selected(draft.signals.entropy),
            history=self._history[rows],
            position=places.astype(np.float64),
            overlap=selected(companion_scores.overlap),
            agreement=selected(companion_scores.agreement),
        )

    def _learn_shares(self, draft: Draft, expected: Floats, plan: Plan) -> None:
        """Learn what the selection kept."""
        drafted = self._drafted(draft)
        reach = np.cumprod(np.where(drafted, expected, 0.0), axis=1)
        verified = drafted & (np.arange(drafted.shape[1]) < np.asarray(plan.lengths)[:, None])
        key = bucket_key(len(self._requests)), self._choice.kind - SCORED
        old = self._kept.get(key, _Kept(0.0, 0.0, 0))
        weight = max(_WEIGHT, 1 / (old.num_steps + 1))
        self._kept[key] = _Kept(
            old.verified + weight * (verified.sum() / drafted.sum() - old.verified),
            old.accepted + weight * (reach[verified].sum() / reach.sum() - old.accepted),
            old.num_steps + 1,
        )

    def observe(self, outcome: Outcome, times: MeasuredTimes) -> None:
        """Learn as ``adaptive``, and the acceptance estimate from scored steps."""
        super().observe(outcome, times)
        known = self._known_tokens(outcome)
        if known is not None:
            self.combined.observe(*known)

    def _known_tokens(self, outcome: Outcome) -> tuple[Signals, Booleans, Floats, Floats] | None:
        """Signals and acceptance of the tokens that the target verified in a scored step.

        ``None`` if the companion did not score the step, or the target verified no draft.

        Returns:
            Signals, whether the request is greedy, the acceptance, and the probability that all
            tokens before it are accepted.
        """
        if self._scored is None or outcome.acceptance is None:
            return None
        draft, companion_scores, _ = self._scored
        acceptance = outcome.acceptance.cpu().double().numpy()
        known = np.arange(acceptance.shape[1]) < np.asarray(outcome.known_lengths)[:, None]
        known &= self._choice.by_model[:, None]
        known[list(outcome.failed)] = False
        if not known.any():
            return None
        before = reached(np.where(known, acceptance, 0.0).cumprod(axis=1))
        rows, places = np.nonzero(known)
        signals = self._signals_of(draft, companion_scores, rows, places)
        return signals, self._greedy[rows], acceptance[known], before[known]

    def _probabilities(self, outcome: Outcome, kept: Floats) -> tuple[Floats, Booleans]:
        """As ``adaptive``, and the estimates of tokens that the selection dropped.

        Verified tokens alone are biased: they were selected because their estimates were high.
        """
        if self._scored is None:
            return super()._probabilities(outcome, kept)
        draft, _, expected = self._scored
        num_verified = np.asarray(outcome.known_lengths)[:, None]
        places = np.arange(expected.shape[1])
        last = np.concatenate([np.ones((len(kept), 1)), kept], axis=1)
        last = np.take_along_axis(last, np.minimum(num_verified, kept.shape[1]), axis=1)
        dropped = places >= num_verified
        tail = np.cumprod(np.where(dropped, expected, 1.0), axis=1) * last
        width = expected.shape[1]
        known = np.zeros((len(kept), width))
        known[:, : kept.shape[1]] = kept[:, :width]
        return np.where(dropped, tail, known), self._drafted(draft)
