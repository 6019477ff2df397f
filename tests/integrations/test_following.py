"""What a model that is asked now and then must read."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.integrations.vllm.following import (
    Drafted,
    Follower,
    Spans,
    in_passes,
    pack,
    slots_of,
)

BLOCK = 4
property_test = settings(deadline=None, derandomize=True, max_examples=80)


def spans(*of_requests):
    rows, starts, counts = np.array(of_requests).T
    return Spans(rows, starts, starts + counts)


def test_packed():
    packed = pack(spans((0, 2, 3), (2, 7, 2)))
    assert packed.rows.tolist() == [0, 2]
    assert packed.starts.tolist() == [0, 3, 5]
    assert packed.lengths.tolist() == [5, 9]
    assert packed.owners.tolist() == [0, 0, 0, 2, 2]
    assert packed.positions.tolist() == [2, 3, 4, 7, 8]
    blocks = np.array([[5, 6, 0], [7, 0, 0], [8, 9, 3]])
    assert slots_of(packed, blocks, BLOCK).tolist() == [22, 23, 24, 39, 12]


@property_test
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 20))
def test_passes_hold_everything_once_and_in_order(counts, most):
    wanted = spans(*((row, row, count) for row, count in enumerate(counts)))
    passes = in_passes(wanted, most)
    read = {row: [] for row in range(len(counts))}
    for each in passes:
        assert 0 < each.counts.sum() <= most
        assert (each.counts > 0).all()
        assert len(set(each.rows.tolist())) == len(each.rows)
        packed = pack(each)
        for row, position in zip(packed.owners.tolist(), packed.positions.tolist(), strict=True):
            read[row].append(position)
    assert read == {row: list(range(row, row + count)) for row, count in enumerate(counts)}
    assert len(passes) == -(-sum(counts) // most)


class TestFollower:
    @staticmethod
    def known(follower, name, *blocks):
        return follower.known([name], np.array([blocks])).tolist()[0]

    @staticmethod
    def followed(**requests):
        follower = Follower(BLOCK)
        for name, (count, blocks) in requests.items():
            follower.follow([name], np.array([count]), np.array([blocks]))
        return follower

    def test_nobody_is_known_at_first(self):
        assert self.known(Follower(BLOCK), "a", 1, 2) == 0

    def test_as_far_as_it_was_followed(self):
        follower = self.followed(a=(6, [1, 2, 0]))
        assert self.known(follower, "a", 1, 2, 3) == 6
        assert self.known(follower, "b", 1, 2, 3) == 0

    def test_other_blocks(self):
        follower = self.followed(a=(10, [1, 2, 3]))
        assert self.known(follower, "a", 1, 9, 3) == 4
        assert self.known(follower, "a", 9, 2, 3) == 0
        assert self.known(follower, "a", 1, 2, 9) == 8
        assert self.known(follower, "a", 1, 2) == 8

    def test_who_left_is_forgotten(self):
        follower = self.followed(a=(3, [1]), b=(3, [1]))
        follower.keep_only({"b", "c"})
        assert self.known(follower, "a", 1) == 0
        assert self.known(follower, "b", 1) == 3

    def test_whose_place_was_taken(self):
        """Another request, then the same one again with fewer tokens in other blocks."""
        follower = self.followed(a=(12, [1, 2, 3]))
        follower.keep_only(())
        follower.follow(["b"], np.array([2]), np.array([[7, 2, 3]]))
        assert self.known(follower, "a", 1, 2, 3) == 0
        assert self.known(follower, "b", 7, 2, 3) == 2

    def test_blocks_are_remembered_as_they_were(self):
        follower, blocks = Follower(BLOCK), np.array([[1, 2]])
        follower.follow(["a"], np.array([8]), blocks)
        blocks[0, 0] = 7
        assert self.known(follower, "a", 1, 2) == 8

    def test_what_is_left_to_read(self):
        follower = self.followed(a=(6, [1, 2, 0]), b=(9, [3, 4, 5]))
        drafted = Drafted(
            ["a", "b", "c"], np.array([0, 2, 3]), np.array([8, 9, 5]), np.array([3, 1, 2])
        )
        blocks = np.array([[1, 2, 9], [3, 4, 5], [6, 7, 0]])
        unread = follower.unread(drafted, blocks)
        assert unread.rows.tolist() == [0, 2, 3]
        assert unread.starts.tolist() == [6, 8, 0]  # the last of a text in any case
        assert unread.ends.tolist() == [10, 9, 6]  # without the last of a draft


@property_test
@given(st.data())
def test_follows_as_one_that_remembers_each_request_by_itself(data):
    """Many requests at once, that come, go, and are given other blocks."""
    follower, plain = Follower(BLOCK), {}
    names = [chr(ord("a") + number) for number in range(6)]
    for _ in range(data.draw(st.integers(1, 12))):
        some = data.draw(st.lists(st.sampled_from(names), unique=True))
        width = data.draw(st.integers(1, 5))
        numbers = st.integers(0, 2)
        blocks = np.array(
            [data.draw(st.lists(numbers, min_size=width, max_size=width)) for _ in some]
        ).reshape(len(some), width)
        expected = []
        for name, now in zip(some, blocks, strict=True):
            count, then = plain.get(name, (0, []))
            same = 0
            while same < min(len(then), width) and then[same] == now[same]:
                same += 1
            expected.append(min(count, same * BLOCK))
        assert follower.known(some, blocks).tolist() == expected
        if data.draw(st.booleans()):
            most = st.integers(0, width * BLOCK)
            counts = np.array([data.draw(most) for _ in some], dtype=np.int64)
            follower.follow(some, counts, blocks)
            for name, count, now in zip(some, counts.tolist(), blocks.tolist(), strict=True):
                plain[name] = count, now[: -(-count // BLOCK)]
        else:
            follower.keep_only(some)
            plain = {name: each for name, each in plain.items() if name in some}
