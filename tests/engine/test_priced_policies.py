"""Policies that price tokens, with choices and prices that cause every kind of decision.

With tiny models speculation gains nothing, so these policies would not draft. Here choices change
from step to step. Some drafts are cut, some are filtered, and some are verified completely.
"""

import pytest

from draftwise.policies import POLICIES
from draftwise.policies.price import Adaptive
from draftwise.policies.step_times import SCORED

from ..stand_ins import SOURCES_WITH_A_MODEL, vary_choices
from .test_lossless import NOT_UNLIKELY, NUM_REQUESTS_OF_EACH_POLICY, Case

pytestmark = pytest.mark.slow

PRICED = [name for name, p in POLICIES.items() if issubclass(p, Adaptive) and p.lossless]


@pytest.fixture
def varying_choices(monkeypatch):
    """The lengths and prices have numbers of steps without a common divisor."""
    lengths = [3, SCORED + 3, 2, SCORED + 2, 1, SCORED + 3, 0, SCORED + 1]
    vary_choices(monkeypatch, lengths, [0.05, 0.2, 0.35, 0.5, 0.7, 0.3, 0.45])


@pytest.mark.covering("policy", "method")
@pytest.mark.parametrize(("method", "gamma"), [("block", 3), ("token", 2)])
@pytest.mark.parametrize("policy", PRICED)
def test_texts_follow_the_target_for_every_kind_of_decision(
    models, varying_choices, policy, method, gamma
):
    case = Case(policy, method, gamma, num_requests=NUM_REQUESTS_OF_EACH_POLICY)
    tokens, requests = case.sampled(models)
    stats = [request.stats for request in requests]
    drafted, verified = (sum(getattr(s, n) for s in stats) for n in ("num_drafted", "num_verified"))
    if policy == "adaptive":
        assert verified == drafted
    else:
        assert 0.2 * drafted < verified < 0.95 * drafted
    assert {s for r in requests[:1000] for s in r.output().token_sources} == SOURCES_WITH_A_MODEL
    p_values = list(case.p_values(models, tokens))
    assert min(p_values) > NOT_UNLIKELY
