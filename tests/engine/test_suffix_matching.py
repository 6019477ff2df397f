"""The search for earlier occurrences, against a plain search."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.engine.suffix_matching import SuffixMatcher
from draftwise.estimators.matches import HIGHEST, MatchAcceptance

MAX_MATCH = 32


def match_length(tokens, place):
    """How many tokens up to a place equal the text's last tokens."""
    length = 0
    while length < min(place + 1, MAX_MATCH) and tokens[place - length] == tokens[-1 - length]:
        length += 1
    return length


def following(tokens, place, count):
    """The tokens after a place, which repeat at the end of the text."""
    known = tokens[place + 1 :]
    return [known[i % len(known)] for i in range(count)]


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None, max_examples=150)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 6))
def test_the_longest_match_is_continued(batch, count):
    matcher = SuffixMatcher(6, 64)
    for slot, tokens in enumerate(batch):
        matcher.begin(slot + 1, tokens[:3])
        matcher.extend(slot + 1, tokens[3:])
    found = matcher.continuations(range(1, len(batch) + 1), count)
    for row, tokens in enumerate(batch):
        lengths = [match_length(tokens, place) for place in range(len(tokens) - 1)]
        assert found.match_lengths[row] <= max(lengths, default=0)
        if not any(lengths):
            assert found.match_lengths[row] == 0
            continue
        places = [p for p, length in enumerate(lengths) if length == found.match_lengths[row]]
        candidates = [following(tokens, place, count) for place in places]
        assert found.tokens[row].tolist() in candidates
        if lengths.count(max(lengths)) == 1 and sum(map(bool, lengths)) == 1:
            assert found.match_lengths[row] == max(lengths)
        assert (found.shares[row] > 0).all()
        assert (found.shares[row] <= 1 + 1e-12).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 6))
def test_a_text_has_the_same_continuation_in_any_company(batch, count):
    matcher = SuffixMatcher(5, 64)
    for slot, tokens in enumerate(batch):
        matcher.begin(slot, tokens)
    together = matcher.continuations(range(len(batch)), count)
    for slot in range(len(batch)):
        alone = matcher.continuations([slot], count)
        for ours, other in zip(together, alone, strict=True):
            assert np.array_equal(ours[slot], other[0])


def test_longer_matches_outweigh_more_frequent_ones():
    matcher = SuffixMatcher(1, 64)
    matcher.begin(0, [1, 2, 3, 4, 9, 3, 4, 5, 3, 4, 5, 1, 2, 3, 4])
    found = matcher.continuations([0], 2)
    assert found.tokens[0].tolist() == [9, 3]
    assert found.match_lengths[0] == 4
    # The others match two tokens, and have a quarter of the weight each.
    assert found.shares[0, 0] == 1 / 1.5


def test_texts_are_periodic_beyond_their_end():
    matcher = SuffixMatcher(1, 64)
    matcher.begin(0, [5, 6, 7, 5, 6, 7, 5])
    assert matcher.continuations([0], 8).tokens[0].tolist() == [6, 7, 5, 6, 7, 5, 6, 7]


def test_a_slot_forgets_its_earlier_text():
    matcher = SuffixMatcher(2, 64)
    matcher.begin(1, [1, 2, 3, 1, 2, 3])
    matcher.begin(1, [1, 2])
    assert matcher.continuations([1], 2).match_lengths.tolist() == [0]
    matcher.extend(1, [1, 4])
    matcher.truncate(1, 3)
    assert matcher.length(1) == 3
    assert matcher.continuations([1], 1).tokens.tolist() == [[2]]


def test_acceptance_is_learnt_by_match_length_and_temperature():
    model = MatchAcceptance()
    shares, greedy = np.ones((1, 2)), np.array([True])
    before = model.predict(shares, np.array([2]), greedy)
    assert before[0, 0] < before[0, 1] < 1
    for _ in range(200):
        model.learn([1.0, 1.0], 2, True, 0)
        model.learn([1.0], 20, True, 1)
    after = model.predict(shares, np.array([2]), greedy)
    assert after[0, 0] < 0.1
    assert model.predict(shares, np.array([20]), greedy)[0, 0] == HIGHEST
    sampled = model.predict(shares, np.array([2]), np.array([False]))
    assert sampled[0, 0] == MatchAcceptance().predict(shares, np.array([2]), ~greedy)[0, 0]
    half = model.predict(shares / 2, np.array([20]), greedy)
    assert abs(half[0, 0] - 0.5) < 0.01
