"""Correct servers fail hardly ever."""

from collections import Counter

import numpy as np
import pytest

from draftwise.audit import sampling
from draftwise.audit.drawing import OTHER, Draws, Subject
from draftwise.audit.law import Law, Sampling
from draftwise.audit.nodes import Nodes
from draftwise.audit.sampling import judged

from .auditing import audited, failures
from .table_server import TableServer

pytestmark = pytest.mark.slow
# That of audits outside these tests.
LEVEL = 0.01
NUM_SETTINGS, NUM_OURS, NUM_THEIRS = 18, 600, 300


def drawn(rng, p, number):
    texts = [*(f"text {index}" for index in range(len(p) - 1)), OTHER]
    return Counter(dict(zip(texts, rng.multinomial(number, p).tolist(), strict=True)))


def simulated(rng, has_laws):
    """The tests of an audit of a correct server, whose answers are drawn from the law itself."""
    draws = []
    for _ in range(NUM_SETTINGS):
        p = rng.dirichlet(np.full(int(rng.integers(2, 60)), 0.4))
        law = Law({f"text {index}": each for index, each in enumerate(p[:-1])}, p[-1])
        ours, theirs = drawn(rng, p, NUM_OURS), drawn(rng, p, NUM_THEIRS)
        subject = Subject("prompt", Nodes())
        draws.append(Draws(subject, Sampling(""), law if has_laws else None, ours, theirs))
    return judged(draws)


@pytest.mark.parametrize("has_laws", [True, False])
def test_simulated_audits_of_a_correct_server(has_laws):
    """The smallest of all corrected p-values is below the level in at most that share of audits."""
    rng = np.random.default_rng(0)
    audits = [simulated(rng, has_laws) for _ in range(400)]
    smallest = [min([each.p_value, *(test.p_value for test in each.tests)]) for each in audits]
    # 4 are expected, and 12 are four standard deviations more.
    assert sum(p_value < LEVEL for p_value in smallest) <= 12
    if has_laws:
        # An audit that hardly ever rejects a law that holds.
        assert np.mean([test.has_law for each in audits for test in each.tests]) > 0.99


@pytest.mark.exhaustive
def test_forty_audits_of_correct_servers(monkeypatch):
    monkeypatch.setattr(sampling, "LEVEL", LEVEL)
    num_failed = 0
    for seed in range(40):
        server = TableServer(seed=seed, num_drafted=1 + seed % 4)
        num_failed += bool(failures(audited(server)))
    assert num_failed <= 1
