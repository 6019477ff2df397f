"""What a model that is asked now and then must read."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.integrations.vllm.following import Follower, Span, in_passes, pack

BLOCK = 4
property_test = settings(deadline=None, derandomize=True, max_examples=80)


def span(row, start, count):
    return Span(row, start, np.arange(start, start + count) + 100 * row)


def test_packed():
    blocks = np.array([[5, 6, 0], [7, 0, 0], [8, 9, 3]])
    packed = pack([span(0, 2, 3), span(2, 7, 2)], blocks, BLOCK)
    assert packed.rows.tolist() == [0, 2]
    assert packed.starts.tolist() == [0, 3, 5]
    assert packed.lengths.tolist() == [5, 9]
    assert packed.tokens.tolist() == [2, 3, 4, 207, 208]
    assert packed.positions.tolist() == [2, 3, 4, 7, 8]
    assert packed.slots.tolist() == [22, 23, 24, 39, 12]


@property_test
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 20))
def test_passes_hold_everything_once_and_in_order(counts, most):
    spans = [span(row, row, count) for row, count in enumerate(counts)]
    passes = in_passes(spans, most)
    read = {row: [] for row in range(len(counts))}
    for each in passes:
        assert 0 < sum(len(part.tokens) for part in each) <= most
        assert len({part.row for part in each}) == len(each)
        for part in each:
            assert part.tokens[0] == part.start + 100 * part.row
            read[part.row] += part.tokens.tolist()
    assert read == {row: each.tokens.tolist() for row, each in enumerate(spans)}
    assert len(passes) == -(-sum(counts) // most)


class TestFollower:
    def test_nobody_is_known_at_first(self):
        assert Follower(BLOCK).known("a", np.array([1, 2])) == 0

    def test_as_far_as_it_was_followed(self):
        follower = Follower(BLOCK)
        follower.follow("a", 6, np.array([1, 2, 0]))
        assert follower.known("a", np.array([1, 2, 3])) == 6
        assert follower.known("b", np.array([1, 2, 3])) == 0

    def test_other_blocks(self):
        follower = Follower(BLOCK)
        follower.follow("a", 10, np.array([1, 2, 3]))
        assert follower.known("a", np.array([1, 9, 3])) == 4
        assert follower.known("a", np.array([9, 2, 3])) == 0
        assert follower.known("a", np.array([1, 2, 9])) == 8
        assert follower.known("a", np.array([1, 2])) == 8

    def test_who_left_is_forgotten(self):
        follower = Follower(BLOCK)
        for name in "ab":
            follower.follow(name, 3, np.array([1]))
        follower.keep_only({"b", "c"})
        assert follower.known("a", np.array([1])) == 0
        assert follower.known("b", np.array([1])) == 3

    def test_blocks_are_remembered_as_they_were(self):
        follower, blocks = Follower(BLOCK), np.array([1, 2])
        follower.follow("a", 8, blocks)
        blocks[0] = 7
        assert follower.known("a", np.array([1, 2])) == 8
