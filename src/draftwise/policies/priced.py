"""What all policies that price have in common: drafting by price, learning, exploring."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.goodput import OperatingPoint
from draftwise.core.types import Draft, Judgement, Outcome, Plan, StepTimes
from draftwise.errors import InvalidParameterError
from draftwise.estimators.combined import Inputs, SignalModel, Signals
from draftwise.policies.base import DraftPosition, Policy, PolicyContext, RequestState
from draftwise.policies.pricing import Price, PriceBook

Floats = NDArray[np.float64]

# Below this probability a filter would hardly drop anything: the token is verified as it is. What
# decides (the price and the tokens before) is known before the token is drawn.
_NOT_WORTH_FILTERING = 0.12
_EXPLORED_TOKENS = 3
# Steps of a new policy that are all learnt from, and then every how manieth of those that do not
# need the signals for a decision.
_APPRENTICESHIP = 64
_WATCH_EVERY = 4


class PricedPolicy(Policy):
    """Drafts while a further draft is worth its price; subclasses choose what is verified.

    A step's prices come from earlier steps. Drafting ends for a request where the value of one
    more draw (:func:`draftwise.core.goodput.worth_drafting`) is not positive: a predictable cut.
    Now and then one request in turn drafts a few tokens that are all verified, whatever the prices
    say, so that estimates of what is not verified do not go stale; whose turn it is depends on the
    number of the step alone.
    """

    needs_latency = True

    def __init__(self, context: PolicyContext, explore_every: int = 64) -> None:
        """Set up.

        Args:
            context: with a latency model.
            explore_every: steps between two explorations, at least 2.
        """
        super().__init__(context)
        if isinstance(explore_every, bool) or not isinstance(explore_every, int):
            raise InvalidParameterError(
                "policy_options.explore_every", f"must be an integer, got {explore_every!r}"
            )
        if explore_every < 2:
            raise InvalidParameterError(
                "policy_options.explore_every", f"must be at least 2, got {explore_every}"
            )
        if context.latency is None:
            raise ValueError(f"{self.name} needs a latency model")
        self.prices = PriceBook(context.latency, context.num_speculative_tokens)
        self._explore_every = explore_every
        self._num_steps = 0
        self._requests: Sequence[RequestState] = ()
        self._price = Price(OperatingPoint(0), 0.0, 0.0)
        self._is_priced = False
        self._watches = True
        self._exploring = -1
        self._max_lengths: list[int] = []
        self._reach: Floats = np.ones(0)
        self._expected: Floats = np.zeros((0, 0))
        self._draft: Draft | None = None
        self._judgement: Judgement | None = None
        self._plan: Plan | None = None

    @abstractmethod
    def expect(self, position: DraftPosition) -> Floats:
        """``[active]`` probability that the token just drafted is accepted, for drafting on."""

    @abstractmethod
    def learn(self, signals: Signals, greedy: NDArray[np.bool_], labels: Labels) -> None:
        """Learn from judged tokens."""

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """All that is allowed for everybody if a first draft pays, else nothing."""
        self._requests = requests
        self._num_steps += 1
        num_requests, gamma = len(requests), self.num_speculative_tokens
        limits = [min(gamma, request.draft_limit) for request in requests]
        self._reach = np.ones(num_requests)
        self._expected = np.zeros((num_requests, gamma))
        self._draft = self._plan = self._judgement = None
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._exploring = -1
        self._max_lengths = [0] * num_requests
        self._is_priced = self._watches = bool(drafting)
        if not drafting:
            return self._max_lengths
        context = sum(request.num_tokens for request in requests)
        self._price = self.prices.price(num_requests, context)
        point = self._price.point
        turn, now = divmod(self._num_steps, self._explore_every)
        if now == 0:
            self._exploring = drafting[turn % len(drafting)]
        for index in drafting:
            self._max_lengths[index] = min(limits[index], point.max_length)
        if point.threshold > 0:
            lengths = np.asarray(self._max_lengths)
            pays = self._pays(np.ones(num_requests), lengths, len(drafting))
            self._max_lengths = (lengths * pays).tolist()
        if self._exploring >= 0:
            self._max_lengths[self._exploring] = min(_EXPLORED_TOKENS, limits[self._exploring])
        # With a length for everybody signals decide nothing: they are looked at now and then only.
        self._watches = (
            point.threshold > 0
            or self._exploring >= 0
            or self._num_steps <= _APPRENTICESHIP
            or self._num_steps % _WATCH_EVERY == 0
        )
        return self._max_lengths

    def uses_draft_signals(self) -> bool:
        """Whether this step's decisions, or learning from it, need them."""
        return self._watches

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Go on while one more draw is worth its price."""
        if not self._watches:
            return None
        active = np.asarray(position.requests)
        expected = self.expect(position)
        self._expected[active, position.index] = expected
        self._reach[active] *= expected
        left = np.asarray(self._max_lengths)[active] - position.index - 1
        goes_on = left > 0
        if self._price.point.threshold > 0:
            goes_on &= self._pays(self._reach[active], left, len(active)) | (
                active == self._exploring
            )
        return torch.from_numpy(goes_on)

    def _pays(
        self, reach: Floats, draws_left: NDArray[np.int64], num_drafting: int
    ) -> NDArray[np.bool_]:
        """Whether one more draw pays for requests.

        Args:
            reach: ``[n]`` probability that all tokens so far are kept.
            draws_left: ``[n]`` draws that are still allowed.
            num_drafting: requests that would share the draft's pass.
        """
        needed = self.prices.draft_thresholds(self._price, num_drafting)[draws_left]
        pays: NDArray[np.bool_] = reach >= np.maximum(needed, self._price.point.threshold)
        return pays

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Follow prices and estimates."""
        draft, plan = self._draft, self._plan
        num_requests = len(self._requests)
        if not num_requests or outcome.acceptance is None:
            return
        acceptance = outcome.acceptance.cpu().double().numpy()
        width = acceptance.shape[1]
        verified = np.arange(width) < np.asarray(outcome.num_verified)[:, None]
        drafted = np.arange(width) < np.asarray(outcome.num_drafted)[:, None]
        failed = list(outcome.failed)
        verified[failed] = drafted[failed] = False
        if times.is_typical and self._is_priced:
            gained = np.cumprod(np.where(verified, acceptance, 0.0), axis=1).sum()
            self.prices.observe(num_requests - len(failed) + float(gained), times.total)
        if draft is None or plan is None or draft.signals is None or not drafted.any():
            return
        # Of all that was drafted: what is verified was chosen because more was expected of it.
        expected = self._expected[:, :width]
        kept = np.cumprod(np.where(verified, acceptance, expected), axis=1)
        reached = np.concatenate([np.ones((num_requests, 1)), kept[:, :-1]], axis=1)
        self.prices.outlook.observe(expected[drafted], reached[drafted])
        rows, places = np.nonzero(verified)
        signals = self.signals_of(draft, self._judgement, rows, places)
        greedy = np.array([request.greedy for request in self._requests])[rows]
        self.learn(signals, greedy, Labels(acceptance[verified], reached[verified]))

    def signals_of(
        self,
        draft: Draft,
        judgement: Judgement | None,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> Signals:
        """Signals of some drafted tokens.

        Args:
            draft: with signals.
            judgement: ``None`` where no companion was asked.
            rows: ``[n]`` their requests.
            places: ``[n]`` their positions.
        """
        assert draft.signals is not None
        history = np.array([request.history for request in self._requests])

        def taken(values: Tensor) -> Floats:
            picked: Floats = values.cpu().double().numpy()[rows, places]
            return picked

        nothing = np.zeros(len(rows))
        return Signals(
            token_prob=taken(draft.signals.token_probs),
            entropy=taken(draft.signals.entropy),
            history=history[rows],
            position=places.astype(np.float64),
            overlap=nothing if judgement is None else taken(judgement.overlap),
            agreement=nothing if judgement is None else taken(judgement.agreement),
        )

    def scorer(self, models: Models) -> Scorer:
        """Models of acceptance, asked about every token of the vocabulary."""

        def score(
            draft: Draft, judgement: Judgement | None, rows: Tensor, place: int, greedy: bool
        ) -> Tensor:
            assert draft.signals is not None
            history = [self._requests[row].history for row in rows.tolist()]
            return models[greedy].log_odds_over_vocabulary(
                draft.signals.beliefs[rows, place],
                draft.signals.entropy[rows, place],
                torch.tensor(history, device=rows.device),
                place,
                None if judgement is None else judgement.beliefs[rows, place],
            )

        return score

    def keep_what_pays(
        self,
        draft: Draft,
        judgement: Judgement | None,
        expected: Floats,
        score: Scorer,
        threshold: float,
    ) -> Plan:
        """Verify a token while it is likely enough to be reached and kept.

        The rule is applied to the whole vocabulary: with w the probability that all before are
        kept, keep(x) = [w·P(x) ≥ threshold], q′ = q·keep, and a drafted token that is not kept ends
        the verified part. ``draft.probs`` is turned into the proposals in place.

        Args:
            draft: with signals.
            judgement: of the companion, if it was asked.
            expected: ``[batch, num_tokens]`` P of the drawn tokens.
            score: P of every token, as log-odds.
            threshold: known before the step.
        """
        assert draft.signals is not None
        lengths = list(draft.lengths)
        reach = np.ones(len(lengths))
        for place in range(draft.tokens.shape[1]):
            open_rows = [row for row, length in enumerate(lengths) if length > place]
            if not open_rows:
                break
            needed = {
                row: threshold / max(reach[row], 1e-9)
                for row in open_rows
                if row != self._exploring
            }
            for greedy in (False, True):
                rows = [
                    row
                    for row, probability in needed.items()
                    if probability > _NOT_WORTH_FILTERING and self._requests[row].greedy == greedy
                ]
                if not rows:
                    continue
                kept = self._filter(draft, judgement, score, rows, place, needed, greedy)
                for row, stays in zip(rows, kept, strict=True):
                    if not stays:
                        lengths[row] = place
            reach[open_rows] *= expected[open_rows, place]
        return Plan(draft.tokens, tuple(lengths), draft.probs)

    def _filter(
        self,
        draft: Draft,
        judgement: Judgement | None,
        score: Scorer,
        rows: list[int],
        place: int,
        needed: dict[int, float],
        greedy: bool,
    ) -> list[bool]:
        """Turn q into q·keep at one position of some requests; whether the drawn tokens stay."""
        device = draft.tokens.device
        index = torch.tensor(rows, device=device)
        limits = np.clip([needed[row] for row in rows], 1e-6, 1 - 1e-6)
        log_odds = torch.tensor(np.log(limits / (1 - limits)), dtype=torch.float32, device=device)
        keep = score(draft, judgement, index, place, greedy) >= log_odds.unsqueeze(1)
        stays = keep.gather(1, draft.tokens[index, place].unsqueeze(1)).squeeze(1)
        if draft.probs is not None:
            draft.probs[index, place] = draft.probs[index, place] * keep
        answer: list[bool] = stays.tolist()
        return answer


class Scorer(Protocol):
    """P(accept) of every token at one position, as log-odds."""

    def __call__(
        self, draft: Draft, judgement: Judgement | None, rows: Tensor, place: int, greedy: bool
    ) -> Tensor:
        """``[rows, vocab]`` for some requests, all greedy or none."""


class Labels:
    """What the target thought of some tokens: ``acceptance`` and ``reached``, each ``[n]``."""

    def __init__(self, acceptance: Floats, reached: Floats) -> None:
        self.acceptance = acceptance
        self.reached = reached

    def where(self, chosen: NDArray[np.bool_]) -> Labels:
        """Those of some tokens."""
        return Labels(self.acceptance[chosen], self.reached[chosen])


Models = dict[bool, SignalModel]


def models_for(context: PolicyContext, inputs: Inputs) -> Models:
    """One model for sampled and one for greedy requests, from the profile where it has one."""
    parameters: Any = {} if context.profile is None else context.profile.parameters
    key = inputs.value
    if key in parameters:
        return {
            greedy: SignalModel.from_tensors(inputs, dict(parameters[key]))
            for greedy in (False, True)
        }
    return {greedy: SignalModel(inputs) for greedy in (False, True)}


def predict(models: Models, signals: Signals, greedy: NDArray[np.bool_]) -> Floats:
    """``[n]`` P of tokens of sampled and greedy requests."""
    if not greedy.any():
        return models[False].predict(signals)
    if greedy.all():
        return models[True].predict(signals)
    return np.where(greedy, models[True].predict(signals), models[False].predict(signals))


def learn(models: Models, signals: Signals, greedy: NDArray[np.bool_], labels: Labels) -> None:
    """Show judged tokens to the models of their kind."""
    for kind, model in models.items():
        chosen = greedy == kind
        if chosen.any():
            part = replace(
                signals, **{name: values[chosen] for name, values in vars(signals).items()}
            )
            those = labels.where(chosen)
            model.observe(part, those.acceptance, those.reached)
