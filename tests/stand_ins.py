"""Fake latencies, draft signals and profiles for tests of policies."""

import functools
import itertools

import numpy as np
import torch

from draftwise import SpeculationConfig
from draftwise.core.latency import LatencyModel
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import DraftSignals, Outcome, StepTimes
from draftwise.estimators.profile import fit_profile
from draftwise.estimators.records import Records
from draftwise.outputs import TokenSource
from draftwise.policies import DraftPosition
from draftwise.policies.guard import Guard
from draftwise.policies.price import Adaptive
from draftwise.policies.step_times import SCORED


class FixedLatency(LatencyModel):
    """Latencies that do not depend on the speed of the machine."""

    def observe_target(self, *_):
        pass

    def observe_draft(self, *_):
        pass

    def observe_companion(self, *_):
        pass


def fixed_latency():
    """Latencies of a machine on which extra tokens are cheap in small batches only."""
    return FixedLatency(
        StageCost((1, 256, 4096), (0.010, 0.011, 0.060)),
        StageCost((1, 4096), (0.0005, 0.001)),
        StageCost((1, 4096), (0.0005, 0.002)),
    )


def unguarded(*arguments, **settings):
    """Speculation without a guard, which would shorten drafts by measured times."""
    return SpeculationConfig(*arguments, guard=False, **settings)


def vary_choices(monkeypatch, lengths, prices):
    """Make ``adaptive`` and its subclasses draft these lengths, at these prices, in turn.

    With tiny models speculation gains nothing, so these policies would not draft. A length is the
    draft length of the model, or a kind of step of :mod:`draftwise.policies.step_times`. A price is
    that of a verified token, in tokens.
    """
    kinds, costs = itertools.cycle(lengths), itertools.cycle(prices)
    begin = Adaptive._begin

    def begun(self, requests):
        begin(self, requests)
        self._price_of_tests = next(costs)

    def take(self, choices):
        wanted = next(kinds)
        known = {choice.kind: choice for choice in choices}
        self._choice = known.get(wanted) or known.get(wanted % SCORED) or choices[-1]

    monkeypatch.setattr(Adaptive, "_begin", begun)
    monkeypatch.setattr(Adaptive, "_take", take)
    monkeypatch.setattr(Adaptive, "_row_price", property(lambda self: self._price_of_tests))
    monkeypatch.setattr(Guard, "rests", lambda self, prices: False)


# The sources of tokens with a draft model, which copies no text.
SOURCES_WITH_A_MODEL = set(TokenSource) - {TokenSource.COPY}
NO_TIMES = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def draft_signals(probs, tokens):
    """Signals of the draft at each drafted position (``probs`` has one more position)."""
    draft_probs = probs[:, : tokens.shape[1]]
    return DraftSignals(draft_probs, entropy(draft_probs), token_probabilities(draft_probs, tokens))


def draft_position(index, requests, draft_probs, tokens):
    """Signals of a drafted token from ``[active, vocab]`` draft_probs and ``[active]`` tokens."""
    draft_probs, tokens = torch.as_tensor(draft_probs), torch.as_tensor(tokens)
    return DraftPosition(
        index,
        requests,
        tokens,
        draft_probs,
        entropy(draft_probs),
        token_probabilities(draft_probs, tokens),
    )


def outcome(drafted, verified, accepted, failed=()):
    """The outcome of a step, by request."""
    nothing = (0,) * len(drafted)
    return Outcome(
        tuple(drafted), tuple(verified), tuple(accepted), nothing, None, frozenset(failed)
    )


def random_records(num_chains=600, length=4, seed=0):
    """Drafted tokens whose acceptance depends on entropy and probability, with noise."""
    rng = np.random.default_rng(seed)
    size = num_chains * length
    position = np.tile(np.arange(length), num_chains)
    entropy = rng.uniform(0.1, 2.0, size)
    top_prob = np.exp(-entropy * rng.uniform(0.3, 0.9, size))
    token_prob = top_prob * rng.uniform(0.1, 1.0, size)
    logit = 2.0 - 1.5 * entropy + 2.5 * token_prob - 0.2 * position + rng.normal(0, 0.5, size)
    acceptance = 1 / (1 + np.exp(-logit))
    floats = {
        "entropy": entropy,
        "token_prob": token_prob,
        "top_prob": top_prob,
        "overlap": np.clip(acceptance + rng.normal(0, 0.2, size), 0, 1),
        "agreement": np.clip(acceptance + rng.normal(0, 0.2, size), 0, 1),
        "history": rng.uniform(0.3, 0.9, size),
        "confidence": np.zeros(size),
        "acceptance": acceptance,
    }
    return Records(
        chain=np.repeat(np.arange(num_chains), length),
        position=position,
        accepted=rng.uniform(size=size) < acceptance,
        **{name: column.astype(np.float32) for name, column in floats.items()},
    )


@functools.cache
def profile():
    """A complete profile, fitted to :func:`random_records`."""
    provenance = {"target": "a", "draft": "b", "companion": "c"}
    return fit_profile(random_records(), provenance)
