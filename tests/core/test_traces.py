"""Recorded drafts, and how they are continued where they ended early."""

import numpy as np
import pytest

from draftwise.core.traces import TraceMemory, Traces, imagined

OUTLOOK = np.arange(16) / 16


def filled(expected, lengths, acceptance=None, repeats=100):
    """A memory in which the same drafts were recorded many times."""
    expected = np.asarray(expected, dtype=float)
    acceptance = expected if acceptance is None else np.asarray(acceptance, dtype=float)
    memory = TraceMemory(expected.shape[1])
    for step in range(repeats):
        memory.observe(step // 8, expected, acceptance, np.asarray(lengths))
    return memory


def test_imagined_drafts_hold_every_value_equally_often():
    drafts = imagined(OUTLOOK, 3, 256)
    assert drafts.expected.shape == (256, 3)
    for column in drafts.expected.T:
        assert np.array_equal(np.unique(column, return_counts=True)[1], np.full(16, 16))
    assert abs(np.corrcoef(drafts.expected.T) - np.eye(3)).max() < 0.2
    assert np.array_equal(drafts.expected, imagined(OUTLOOK, 3, 256).expected)
    assert imagined(OUTLOOK, 0, 10).expected.shape == (10, 0)


def test_without_records_drafts_are_imagined():
    recalled = TraceMemory(4).recall(OUTLOOK)
    assert np.array_equal(recalled.expected, imagined(OUTLOOK, 4, 256).expected)
    assert np.array_equal(recalled.acceptance, recalled.expected)


def test_complete_drafts_are_recalled_as_they_were():
    recalled = filled([[0.5, 0.25], [0.75, 1.0]], [2, 2], [[1.0, 0.0], [0.5, 0.5]], 300).recall(
        OUTLOOK
    )
    assert len(recalled) == 512
    pairs = np.concatenate([recalled.expected, recalled.acceptance], axis=1)
    rows, counts = np.unique(pairs, axis=0, return_counts=True)
    assert rows.tolist() == [[0.5, 0.25, 1.0, 0.0], [0.75, 1.0, 0.5, 0.5]]
    assert counts.tolist() == [256, 256]


def test_what_is_imagined_makes_room_first():
    recalled = filled([[0.3, 0.3]], [2], repeats=40).recall(OUTLOOK)
    assert len(recalled) == 64
    assert (recalled.expected == 0.3).all(axis=1).sum() == 40
    assert len(filled([[0.3, 0.3]], [2], repeats=100).recall(OUTLOOK)) == 100


def test_the_oldest_are_forgotten():
    memory = filled([[0.1]], [1], repeats=600)
    for _ in range(511):
        memory.observe(75, np.array([[0.9]]), np.array([[0.9]]), np.array([1]))
    values, counts = np.unique(memory.recall(OUTLOOK).expected, return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([0.1, 0.9], [1, 511])


def test_a_draft_that_ended_goes_on_as_those_like_it_did():
    """Tokens of a draft depend on each other: good ones follow good ones."""
    random = np.random.default_rng(0)
    memory = TraceMemory(3)
    for step in range(400):
        level = random.choice([0.2, 0.9])
        draft = np.full((1, 3), level) + random.uniform(-0.05, 0.05, (1, 3))
        memory.observe(step // 4, draft, draft, np.array([3 if step % 4 == 0 else 1]))
    recalled = memory.recall(OUTLOOK).acceptance
    # But for a few at the border between the two.
    assert np.quantile(np.abs(recalled - recalled[:, :1]), 0.97) <= 0.1 + 1e-9


def test_a_few_long_drafts_in_which_good_tokens_follow_good_ones_are_not_watered_down():
    """Of independent tokens as good as these a draft of seven would gain half as much."""
    random = np.random.default_rng(1)
    memory = TraceMemory(7)
    drafts = np.repeat(random.choice([0.3, 0.95], (80, 1)), 7, axis=1)
    for step, draft in enumerate(drafts):
        memory.observe(step, draft[None], draft[None], np.array([7]))
    gained = np.cumprod(memory.recall(OUTLOOK).acceptance, axis=1).sum(axis=1).mean()
    assert gained == pytest.approx(np.cumprod(drafts, axis=1).sum(axis=1).mean())


def test_without_others_that_went_on_the_rest_is_imagined():
    recalled = filled([[0.5, 0.0]], [1], repeats=600).recall(OUTLOOK)
    assert (recalled.expected[:, 0] == 0.5).all()
    assert recalled.expected[:, 1].mean() == pytest.approx(OUTLOOK.mean())


def test_who_drafted_nothing_is_not_recorded():
    memory = TraceMemory(2)
    memory.observe(0, np.zeros((3, 2)), np.zeros((3, 2)), np.zeros(3, dtype=int))
    assert np.array_equal(memory.recall(OUTLOOK).expected, imagined(OUTLOOK, 2, 256).expected)


def test_requests_of_a_large_batch_take_turns_and_some_come_first():
    memory = TraceMemory(1)
    expected = np.arange(32.0)[:, None] / 32
    for _ in range(64):
        memory.observe(0, expected, expected, np.ones(32, dtype=int), first=[5, 17])
    values, counts = np.unique(memory.recall(OUTLOOK).expected, return_counts=True)
    assert len(values) == 32
    assert counts[[5, 17]].tolist() == [64, 64]
    assert np.ptp(np.delete(counts, [5, 17])) <= 1


def test_drafts_shorter_than_the_longest_fit():
    memory = TraceMemory(5)
    memory.observe(0, np.full((1, 2), 0.5), np.full((1, 2), 0.25), np.array([2]))
    recalled = memory.recall(OUTLOOK)
    assert isinstance(recalled, Traces)
    assert recalled.acceptance[0, :2].tolist() == [0.25, 0.25]
    assert recalled.acceptance.shape == (64, 5)


def test_old_drafts_are_forgotten_as_long_as_enough_are_left():
    memory = TraceMemory(1)

    def record(step, value, count):
        for _ in range(count):
            memory.observe(step, np.array([[value]]), np.array([[value]]), np.array([1]))

    def counts():
        return dict(
            zip(*np.unique(memory.recall(OUTLOOK).expected, return_counts=True), strict=True)
        )

    record(0, 0.1, 300)
    assert counts() == {0.1: 300}
    record(400, 0.2, 10)
    assert counts() == {0.1: 300, 0.2: 10}
    record(700, 0.3, 10)
    assert counts() == {0.1: 236, 0.2: 10, 0.3: 10}
    record(800, 0.4, 240)
    assert counts() == {0.2: 10, 0.3: 10, 0.4: 240}
