"""Correct servers fail hardly ever, and a bias is noticed as often as an audit says."""

from collections import Counter

import numpy as np
import pytest

from draftwise.audit import sampling
from draftwise.audit.drawing import OTHER, Draws, Subject
from draftwise.audit.law import Law, Sampling
from draftwise.audit.nodes import Nodes
from draftwise.audit.sampling import judged

from .auditing import audited, failures
from .table_server import TableServer, tilted

pytestmark = pytest.mark.slow
# That of audits outside these tests.
LEVEL = 0.01
NUM_SETTINGS, NUM_OURS, NUM_THEIRS = 18, 600, 300
NUM_AUDITS = 40


def drawn(rng, p, number):
    texts = [*(f"text {index}" for index in range(len(p) - 1)), OTHER]
    return Counter(dict(zip(texts, rng.multinomial(number, p).tolist(), strict=True)))


def simulated(rng, laws, has_laws, bias=0.0):
    """The tests of an audit whose answers are drawn from the laws, or with a bias."""
    draws = []
    for p in laws:
        law = Law({f"text {index}": each for index, each in enumerate(p[:-1])}, p[-1])
        ours = drawn(rng, tilted(p, bias) if bias else p, NUM_OURS)
        theirs, subject = drawn(rng, p, NUM_THEIRS), Subject("prompt", Nodes())
        draws.append(Draws(subject, Sampling(""), law if has_laws else None, ours, theirs))
    return judged(draws)


def random_laws(rng, most_cells, concentration, fewest_cells=2):
    return [
        rng.dirichlet(np.full(int(rng.integers(fewest_cells, most_cells)), concentration))
        for _ in range(NUM_SETTINGS)
    ]


def smallest_p_value(sampled):
    return min([sampled.p_value, *(test.p_value for test in sampled.tests)])


@pytest.mark.parametrize("has_laws", [True, False])
def test_simulated_audits_of_a_correct_server(has_laws):
    """The smallest of all corrected p-values is below the level in at most that share of audits."""
    rng = np.random.default_rng(0)
    audits = [simulated(rng, random_laws(rng, 60, 0.4), has_laws) for _ in range(400)]
    # 4 are expected, and 12 are four standard deviations more.
    assert sum(smallest_p_value(each) < LEVEL for each in audits) <= 12
    if has_laws:
        # An audit that hardly ever rejects a law that holds.
        assert np.mean([test.has_law for each in audits for test in each.tests]) > 0.99


@pytest.mark.parametrize("has_laws", [True, False])
def test_a_bias_is_seen_as_often_as_an_audit_says(monkeypatch, has_laws):
    """The bias that it names has the shape that is hardest to see, so the share is about 0.95."""
    monkeypatch.setattr(sampling, "LEVEL", LEVEL)
    rng = np.random.default_rng(1)
    num_seen = 0
    for _ in range(400):
        laws = random_laws(rng, 12, 3.0, fewest_cells=6)
        bias = simulated(rng, laws, has_laws).seen_bias()
        assert 0.03 < bias < 0.12
        num_seen += smallest_p_value(simulated(rng, laws, has_laws, bias)) < LEVEL
    # Three standard deviations below 0.95, and more where one test sees what the sum does not.
    assert 0.95 - 0.033 <= num_seen / 400 < 1


@pytest.mark.exhaustive
def test_audits_find_the_bias_that_they_say(monkeypatch):
    """A server whose answers differ by a bias is found in about 0.95 of audits that aim at it."""
    monkeypatch.setattr(sampling, "LEVEL", LEVEL)
    bias, num_found = 0.06, 0
    for seed in range(NUM_AUDITS):
        server = TableServer(seed=seed, bias=bias)
        result = audited(server, checks=("sampling",), requests=40_000, bias=bias)
        assert result.sampled.seen_bias() <= bias
        num_found += bool(failures(result))
    # 38 are expected, and 34 are three standard deviations fewer.
    assert num_found >= 34


@pytest.mark.exhaustive
def test_forty_audits_of_correct_servers(monkeypatch):
    monkeypatch.setattr(sampling, "LEVEL", LEVEL)
    num_failed = 0
    for seed in range(NUM_AUDITS):
        server = TableServer(seed=seed, num_drafted=1 + seed % 4)
        num_failed += bool(failures(audited(server)))
    assert num_failed <= 1
