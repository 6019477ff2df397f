"""Estimated acceptance of nodes of token trees."""

import numpy as np
import pytest

from draftwise.estimators.nodes import HIGHEST, LOWEST, NodeAcceptance

PROBS = np.array([[0.6, 0.2, 0.05], [0.9, 0.05, 0.0]])


def test_it_starts_from_the_probabilities_of_the_draft():
    found = NodeAcceptance().predict(PROBS)
    assert found == pytest.approx(np.clip(PROBS, LOWEST, HIGHEST))


def test_it_learns_each_rank_on_its_own():
    learnt = NodeAcceptance()
    count = 400
    right = np.arange(count) % 10 < 3
    learnt.learn(np.ones(count, dtype=bool), np.full(count, 0.6), right)
    found = learnt.predict(PROBS)
    assert found[0, 0] == pytest.approx(0.3, abs=0.03)
    assert found[0, 1] == pytest.approx(0.2)
    assert found[1, 0] == pytest.approx(0.9)


def test_children_of_a_node_have_at_most_one_in_all():
    learnt = NodeAcceptance()
    always = np.ones(2000, dtype=bool)
    for is_first, prob in ((True, 0.5), (False, 0.3)):
        kinds = np.full(2000, is_first)
        learnt.learn(kinds, np.full(2000, prob), always)
    found = learnt.predict(np.array([[0.5, 0.35, 0.1]]))
    assert found.sum() == pytest.approx(1.0)
    assert (found > 0).all()


def test_nothing_is_learnt_from_no_nodes():
    learnt = NodeAcceptance()
    empty = np.array([])
    learnt.learn(empty.astype(bool), empty, empty.astype(bool))
    assert learnt.predict(PROBS) == pytest.approx(np.clip(PROBS, LOWEST, HIGHEST))
