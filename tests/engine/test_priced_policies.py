"""Policies that price, under prices that make every kind of decision happen.

On a tiny model nothing pays, so that a priced policy would do nothing at all; here prices change
from step to step, and drafts are cut, filtered and verified whole, side by side.
"""

import itertools

import numpy as np
import pytest

from draftwise.core.goodput import OperatingPoint
from draftwise.outputs import TokenSource
from draftwise.policies import POLICIES
from draftwise.policies.mixture import Mixture
from draftwise.policies.priced import PricedPolicy
from draftwise.policies.pricing import Price, PriceBook

from .test_lossless import NOT_UNLIKELY, Case

PRICED = [name for name, p in POLICIES.items() if issubclass(p, PricedPolicy) and p.lossless]


@pytest.fixture
def lively_prices(monkeypatch):
    points = itertools.cycle([0.05, 0.2, 0.0, 0.35, 0.5, 0.7, 0.3, 0.45])
    lengths = itertools.cycle([3, 2, 4])
    drafts = itertools.cycle([0.1, 0.5, 0.0, 0.3])

    def price(*_):
        threshold = next(points)
        return Price(OperatingPoint(next(lengths), threshold), 1.0, threshold or 0.4)

    monkeypatch.setattr(PriceBook, "price", price)
    monkeypatch.setattr(
        PriceBook,
        "draft_thresholds",
        lambda book, *_: np.array([np.inf] + [next(drafts)] * book._max_draft_length),
    )
    monkeypatch.setattr(PriceBook, "companion_price", lambda *_: 0.0)


@pytest.mark.parametrize(("method", "gamma"), [("block", 3), ("token", 2)])
@pytest.mark.parametrize("policy", PRICED)
def test_whatever_is_decided_texts_follow_the_target(models, lively_prices, policy, method, gamma):
    case = Case(policy, method, gamma)
    tokens, requests = case.sampled(models)
    stats = [request.stats for request in requests]
    drafted, verified = (sum(getattr(s, n) for s in stats) for n in ("num_drafted", "num_verified"))
    assert 0.2 * drafted < verified < 0.9 * drafted
    assert {s for r in requests[:1000] for s in r.output().token_sources} == set(TokenSource)
    p_values = list(case.p_values(models, tokens))
    assert min(p_values) > NOT_UNLIKELY


@pytest.mark.parametrize("policy", ["adaptive", "sv", "sv-predictable"])
def test_a_rule_says_what_asking_says(models, monkeypatch, policy):
    """Kernels that follow the policy's rule stop where the policy would have stopped."""
    runs = []
    for asks in (False, True):
        with monkeypatch.context() as patch:
            points = itertools.cycle([(4, 0.3), (3, 0.0), (4, 0.15), (0, 0.0), (4, 0.5)])
            patch.setattr(
                PriceBook,
                "price",
                lambda *_, points=points: Price(OperatingPoint(*next(points)), 1.0, 0.3),
            )
            patch.setattr(
                PriceBook,
                "draft_thresholds",
                lambda _, price, n: np.array([np.inf, 0.35, 0.3, 0.25, 0.2]) * (1 + n / 20),
            )
            if asks:
                patch.setattr(Mixture, "stop_rule", lambda _: None)
            _, requests = Case(policy, "block", 4).sampled(models, 400, 7)
        runs.append([(r.tokens, r.stats.num_drafted, r.stats.num_verified) for r in requests])
    assert len({drafted for _, drafted, _ in runs[0]}) > 3
    assert runs[0] == runs[1]
