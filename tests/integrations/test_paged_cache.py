"""Bookkeeping of a companion's paged KV cache."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.integrations.vllm.paged_cache import (
    ComputedTokens,
    DraftedRequests,
    Spans,
    pack,
    slot_mapping,
    split_into_passes,
)

BLOCK = 4
property_test = settings(deadline=None, derandomize=True, max_examples=80)


def spans(*of_requests):
    rows, starts, counts = np.array(of_requests).T
    return Spans(rows, starts, starts + counts)


def test_packed_positions_and_slots():
    packed = pack(spans((0, 2, 3), (2, 7, 2)))
    assert packed.rows.tolist() == [0, 2]
    assert packed.starts.tolist() == [0, 3, 5]
    assert packed.lengths.tolist() == [5, 9]
    assert packed.owners.tolist() == [0, 0, 0, 2, 2]
    assert packed.positions.tolist() == [2, 3, 4, 7, 8]
    blocks = np.array([[5, 6, 0], [7, 0, 0], [8, 9, 3]])
    assert slot_mapping(packed, blocks, BLOCK).tolist() == [22, 23, 24, 39, 12]


@property_test
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 20))
def test_passes_contain_every_token_once_in_order(counts, max_tokens):
    every = spans(*((row, row, count) for row, count in enumerate(counts)))
    passes = split_into_passes(every, max_tokens)
    read = {row: [] for row in range(len(counts))}
    for each in passes:
        assert 0 < each.counts.sum() <= max_tokens
        assert (each.counts > 0).all()
        assert len(set(each.rows.tolist())) == len(each.rows)
        packed = pack(each)
        for row, position in zip(packed.owners.tolist(), packed.positions.tolist(), strict=True):
            read[row].append(position)
    assert read == {row: list(range(row, row + count)) for row, count in enumerate(counts)}
    assert len(passes) == -(-sum(counts) // max_tokens)


class TestComputedTokens:
    @staticmethod
    def count(computed, name, *blocks):
        return computed.counts([name], np.array([blocks])).tolist()[0]

    @staticmethod
    def recorded(**requests):
        computed = ComputedTokens(BLOCK)
        for name, (count, blocks) in requests.items():
            computed.record([name], np.array([count]), np.array([blocks]))
        return computed

    def test_no_tokens_are_computed_at_first(self):
        assert self.count(ComputedTokens(BLOCK), "a", 1, 2) == 0

    def test_recorded_tokens_count(self):
        computed = self.recorded(a=(6, [1, 2, 0]))
        assert self.count(computed, "a", 1, 2, 3) == 6
        assert self.count(computed, "b", 1, 2, 3) == 0

    def test_tokens_in_other_blocks_do_not_count(self):
        computed = self.recorded(a=(10, [1, 2, 3]))
        assert self.count(computed, "a", 1, 9, 3) == 4
        assert self.count(computed, "a", 9, 2, 3) == 0
        assert self.count(computed, "a", 1, 2, 9) == 8
        assert self.count(computed, "a", 1, 2) == 8

    def test_removed_requests_have_no_tokens(self):
        computed = self.recorded(a=(3, [1]), b=(3, [1]))
        computed.keep_only({"b", "c"})
        assert self.count(computed, "a", 1) == 0
        assert self.count(computed, "b", 1) == 3

    def test_the_place_of_a_removed_request_can_be_used_again(self):
        computed = self.recorded(a=(12, [1, 2, 3]))
        computed.keep_only(())
        computed.record(["b"], np.array([2]), np.array([[7, 2, 3]]))
        assert self.count(computed, "a", 1, 2, 3) == 0
        assert self.count(computed, "b", 7, 2, 3) == 2

    def test_the_block_table_is_copied(self):
        computed, blocks = ComputedTokens(BLOCK), np.array([[1, 2]])
        computed.record(["a"], np.array([8]), blocks)
        blocks[0, 0] = 7
        assert self.count(computed, "a", 1, 2) == 8

    def test_missing_tokens_are_found(self):
        computed = self.recorded(a=(6, [1, 2, 0]), b=(9, [3, 4, 5]))
        drafted = DraftedRequests(
            ["a", "b", "c"], np.array([0, 2, 3]), np.array([8, 9, 5]), np.array([3, 1, 2])
        )
        blocks = np.array([[1, 2, 9], [3, 4, 5], [6, 7, 0]])
        missing = computed.missing(drafted, blocks)
        assert missing.rows.tolist() == [0, 2, 3]
        assert missing.starts.tolist() == [6, 8, 0]  # a text's last token is always included
        assert missing.ends.tolist() == [10, 9, 6]  # a draft's last token is never included


@property_test
@given(st.data())
def test_computed_tokens_equal_a_dictionary_by_request(data):
    """Requests join, leave and get other blocks."""
    computed, plain = ComputedTokens(BLOCK), {}
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
        assert computed.counts(some, blocks).tolist() == expected
        if data.draw(st.booleans()):
            any_count = st.integers(0, width * BLOCK)
            counts = np.array([data.draw(any_count) for _ in some], dtype=np.int64)
            computed.record(some, counts, blocks)
            for name, count, now in zip(some, counts.tolist(), blocks.tolist(), strict=True):
                plain[name] = count, now[: -(-count // BLOCK)]
        else:
            computed.keep_only(some)
            plain = {name: each for name, each in plain.items() if name in some}
