"""Policies that price tokens, with prices that cause every kind of decision.

With tiny models speculation gains nothing, so these policies would not draft. Here prices change
from step to step. Some drafts are cut, some are filtered, and some are verified completely.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from draftwise.core.goodput import OperatingPoint
from draftwise.models.native.library import kernel_in_use
from draftwise.params import SamplingParams
from draftwise.policies import POLICIES
from draftwise.policies.adaptive import Adaptive
from draftwise.policies.priced import PricedPolicy
from draftwise.policies.pricing import Price, Pricing
from draftwise.policies.router import PolicyRouter

from ..stand_ins import SOURCES_WITH_A_MODEL
from .test_lossless import COLD, HOT, NOT_UNLIKELY, NUM_REQUESTS_OF_EACH_POLICY, PLAIN, Case

pytestmark = pytest.mark.slow

PRICED = [name for name, p in POLICIES.items() if issubclass(p, PricedPolicy) and p.lossless]


@pytest.fixture
def varying_prices(monkeypatch):
    points = itertools.cycle([0.05, 0.2, 0.0, 0.35, 0.5, 0.7, 0.3, 0.45])
    lengths = itertools.cycle([3, 2, 4])
    verifies_all = itertools.cycle([False, False, True, False, False])

    def price(*_):
        threshold = next(points)
        point = OperatingPoint(next(lengths), threshold, next(verifies_all))
        return Price(point, 1.0, threshold or 0.4)

    monkeypatch.setattr(Pricing, "price", price)
    monkeypatch.setattr(Pricing, "companion_price", lambda *_: 0.0)


@pytest.mark.covering("policy", "method")
@pytest.mark.parametrize(("method", "gamma"), [("block", 3), ("token", 2)])
@pytest.mark.parametrize("policy", PRICED)
def test_texts_follow_the_target_for_every_kind_of_decision(
    models, varying_prices, policy, method, gamma
):
    case = Case(policy, method, gamma, num_requests=NUM_REQUESTS_OF_EACH_POLICY)
    tokens, requests = case.sampled(models)
    stats = [request.stats for request in requests]
    drafted, verified = (sum(getattr(s, n) for s in stats) for n in ("num_drafted", "num_verified"))
    assert 0.2 * drafted < verified < 0.9 * drafted
    assert {s for r in requests[:1000] for s in r.output().token_sources} == SOURCES_WITH_A_MODEL
    p_values = list(case.p_values(models, tokens))
    assert min(p_values) > NOT_UNLIKELY


def mixed_requests(engine, count):
    """Sampled and greedy requests that do not depend on earlier tokens of their texts."""
    params = [PLAIN, COLD, HOT, SamplingParams(temperature=0.0)]
    return [
        engine.add(
            None,
            [1 + seed % 3, seed % 5],
            replace(params[seed % len(params)], max_tokens=4 + seed % 3, seed=seed),
        )
        for seed in range(count)
    ]


@pytest.fixture
def reset_operating_points(monkeypatch):
    """Restart a cycle of operating points."""

    def begin():
        filtered = [(4, 0.3), (3, 0.0), (4, 0.15), (0, 0.0), (4, 0.5)]
        points = itertools.cycle([*filtered, *filtered, (4, 0.4, True)])
        monkeypatch.setattr(
            Pricing, "price", lambda *_: Price(OperatingPoint(*next(points)), 1.0, 0.3)
        )

    return begin


@pytest.mark.parametrize("policy", ["adaptive", "sv", "sv-predictable"])
def test_rules_in_kernels_decide_like_the_policy(
    models, reset_operating_points, monkeypatch, policy
):
    """Native kernels that apply the policy's rule stop at the same positions as the policy."""
    runs, num_followed, draft_rule = [], [], PolicyRouter.draft_rule
    for calls_policy in (False, True):
        reset_operating_points()
        with monkeypatch.context() as patch:
            followed = []

            def rule(self, calls_policy=calls_policy, followed=followed):
                said = None if calls_policy else draft_rule(self)
                followed.append(said is not None)
                return said

            patch.setattr(PolicyRouter, "draft_rule", rule)
            engine = Case(policy, "block", 4).engine(models, 7)
            requests = mixed_requests(engine, 400)
            while engine.num_unfinished:
                engine.step()
        runs.append([(r.tokens, r.stats.num_drafted, r.stats.num_verified) for r in requests])
        num_followed.append(sum(followed))
    if kernel_in_use() == "native":
        assert num_followed[0] > 100
    assert num_followed[1] == 0
    assert len({drafted for _, drafted, _ in runs[0]}) > 3
    assert runs[0] == runs[1]


@pytest.mark.skipif(kernel_in_use() != "native", reason="only native kernels apply rules")
def test_rule_results_equal_the_policys_selection(models, reset_operating_points, monkeypatch):
    """They are compared up to the first dropped token."""
    select, lengths, bounds = Adaptive.select, [], []

    def both(self, draft, companion_scores):
        untouched = replace(draft, probs=None if draft.probs is None else draft.probs.clone())
        plan = select(self, draft, companion_scores)
        threshold = self.filter_threshold
        if companion_scores is not None or threshold == 0 or not any(draft.lengths):
            return plan
        assert self._rule_results.cover(draft)
        found = self.keep_in_range(untouched, self._expected, self.models, threshold)
        assert plan.lengths == found.lengths
        for request, kept in enumerate(plan.lengths):
            decided = slice(0, min(kept + 1, draft.lengths[request]))
            lengths.append((draft.lengths[request], kept))
            if plan.proposals is not None:
                mine, theirs = ([b[request, decided] for b in p.between] for p in (plan, found))
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0.0)
                bounds.extend(mine[0].tolist())
                assert torch.equal(
                    plan.filtered().proposals[request, decided],
                    found.filtered().proposals[request, decided],
                )
        return plan

    monkeypatch.setattr(Adaptive, "select", both)
    reset_operating_points()
    engine = Case("adaptive", "block", 4).engine(models, 7)
    mixed_requests(engine, 400)
    while engine.num_unfinished:
        engine.step()
    assert sum(kept < drafted for drafted, kept in lengths) > 50
    assert len({kept for _, kept in lengths}) > 3
    assert sum(0 < bound < 1 for bound in bounds) > 50
