"""Signals, compared with definitions, brute force and the bounds on acceptance."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftwise.core.signals import (
    agreement,
    bretagnolle_huber_bound,
    entropy,
    kl_divergence,
    overlap,
    pinsker_bound,
    token_probabilities,
)

property_test = settings(deadline=None, derandomize=True, max_examples=150)

# Many weights are 0, and others differ by many orders of magnitude.
weights = st.one_of(st.just(0.0), st.floats(0.01, 1.0), st.floats(1e-12, 1e-3))
SIZES = st.integers(1, 12)


@st.composite
def distributions(draw, count=2, positive=False):
    """``count`` distributions over one vocabulary, in float64."""
    size = draw(SIZES)
    rows = []
    for _ in range(count):
        entries = st.floats(1e-9, 1.0) if positive else weights
        row = torch.tensor(draw(st.lists(entries, min_size=size, max_size=size))).double()
        assume(row.sum() > 0)
        rows.append(row / row.sum())
    return rows


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


class TestEntropy:
    def test_uniform(self):
        for size in [1, 2, 10, 4096]:
            q = torch.full((size,), 1 / size, dtype=torch.float64)
            assert entropy(q).item() == pytest.approx(math.log(size), abs=1e-12)

    def test_a_coin(self):
        expected = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
        assert entropy(tensor(0.1, 0.9)).item() == pytest.approx(expected)

    def test_geometric(self):
        """H = (−r·log r − (1 − r)·log(1 − r)) / (1 − r)."""
        r = 0.6
        q = (1 - r) * r ** torch.arange(200, dtype=torch.float64)
        expected = -(r * math.log(r) + (1 - r) * math.log(1 - r)) / (1 - r)
        assert entropy(q).item() == pytest.approx(expected)

    def test_one_hot_and_zero_rows(self):
        assert entropy(tensor(0.0, 1.0, 0.0)).item() == 0.0
        assert entropy(torch.zeros(3, 5)).tolist() == [0.0] * 3

    @property_test
    @given(distributions(1))
    def test_brute_force_and_bounds(self, drawn):
        (q,) = drawn
        expected = -sum(each * math.log(each) for each in q.tolist() if each)
        assert entropy(q).item() == pytest.approx(expected, abs=1e-12)
        assert -1e-12 <= entropy(q).item() <= math.log(len(q)) + 1e-12


class TestOverlapAndAgreement:
    def test_by_hand(self):
        q, c = tensor(0.5, 0.5, 0.0), tensor(0.9, 0.0, 0.1)
        assert overlap(q, c).item() == pytest.approx(0.5)
        assert agreement(q, c).tolist() == [1.0, 0.0, 0.0]
        assert agreement(c, q).tolist() == pytest.approx([5 / 9, 0.0, 0.0])

    @property_test
    @given(distributions())
    def test_overlap_is_one_minus_total_variation(self, drawn):
        q, c = drawn
        tv = sum(abs(a - b) for a, b in zip(q.tolist(), c.tolist(), strict=True)) / 2
        assert overlap(q, c).item() == pytest.approx(1 - tv, abs=1e-12)
        assert overlap(q, c) == overlap(c, q)
        assert overlap(q, q).item() == pytest.approx(1.0)

    @property_test
    @given(distributions())
    def test_mean_agreement_of_drawn_tokens_is_the_overlap(self, drawn):
        q, c = drawn
        a = agreement(q, c)
        assert ((a >= 0) & (a <= 1)).all()
        assert (q * a).sum().item() == pytest.approx(overlap(q, c).item(), abs=1e-12)

    @property_test
    @given(distributions())
    def test_agreement_of_a_token(self, drawn):
        """The engine computes it from the probabilities of the tokens alone."""
        q, c = drawn
        for token in range(len(q)):
            index = torch.tensor(token)
            alone = agreement(token_probabilities(q, index), token_probabilities(c, index))
            assert alone == agreement(q, c)[token]
            if q[token] > 0:
                assert alone.item() == pytest.approx(min(1.0, (c[token] / q[token]).item()))

    def test_zero_rows(self):
        q, nothing = tensor(0.3, 0.7), torch.zeros(2, dtype=torch.float64)
        for a, b in ((q, nothing), (nothing, q), (nothing, nothing)):
            assert overlap(a, b).item() == 0.0
            assert agreement(a, b).tolist() == [0.0, 0.0]

    def test_the_smallest_numbers(self):
        """c/q overflows where q is nearly 0: it is clamped."""
        tiny = torch.finfo(torch.float32).tiny
        assert agreement(torch.tensor([tiny]), torch.tensor([1.0])).tolist() == [1.0]
        assert agreement(torch.tensor([1.0]), torch.tensor([tiny])).tolist() == [tiny]

    @property_test
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 6), st.integers(0, 99))
    def test_any_leading_shape(self, batch, width, vocab, seed):
        generator = torch.Generator().manual_seed(seed)
        q, c = torch.rand(2, batch, width, vocab, generator=generator, dtype=torch.float64)
        q, c = q / q.sum(-1, keepdim=True), c / c.sum(-1, keepdim=True)
        tokens = torch.randint(0, vocab, (batch, width), generator=generator)
        for b in range(batch):
            for i in range(width):
                assert entropy(q)[b, i] == entropy(q[b, i])
                assert overlap(q, c)[b, i] == overlap(q[b, i], c[b, i])
                assert torch.equal(agreement(q, c)[b, i], agreement(q[b, i], c[b, i]))
                assert token_probabilities(q, tokens)[b, i] == q[b, i, tokens[b, i]]


class TestDivergence:
    def test_coins(self):
        p, q = tensor(0.5, 0.5), tensor(0.9, 0.1)
        expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
        assert kl_divergence(p, q).item() == pytest.approx(expected)
        assert kl_divergence(p, p).item() == 0.0

    @property_test
    @given(distributions())
    def test_brute_force(self, drawn):
        p, q = drawn
        expected = 0.0
        for a, b in zip(p.tolist(), q.tolist(), strict=True):
            if a:
                expected += a * math.log(a / b) if b else math.inf
        assert kl_divergence(p, q).item() == pytest.approx(expected, abs=1e-9)

    def test_infinite_where_q_is_zero(self):
        p, q = tensor(0.5, 0.5), tensor(1.0, 0.0)
        assert kl_divergence(p, q).item() == math.inf
        assert kl_divergence(q, p).item() == pytest.approx(math.log(2))

    def test_zero_rows(self):
        nothing = torch.zeros(3, dtype=torch.float64)
        assert kl_divergence(nothing, nothing).item() == 0.0


class TestBounds:
    def test_closed_forms(self):
        kl = tensor(0.0, 0.5, 2.0, 50.0)
        expected = [1.0, 0.5, 0.0, 0.0]
        assert pinsker_bound(kl).tolist() == pytest.approx(expected)
        expected = [1 - math.sqrt(1 - math.exp(-k)) for k in kl.tolist()]
        assert bretagnolle_huber_bound(kl).tolist() == pytest.approx(expected)

    def test_bounds_are_zero_at_infinite_divergence(self):
        assert pinsker_bound(tensor(math.inf)).tolist() == [0.0]
        assert bretagnolle_huber_bound(tensor(math.inf)).tolist() == [0.0]
        kl = kl_divergence(tensor(0.5, 0.5), tensor(1.0, 0.0))
        assert pinsker_bound(kl).item() == bretagnolle_huber_bound(kl).item() == 0.0

    def test_bounds_are_one_at_slightly_negative_divergence(self):
        """The divergence of equal distributions may come out as a tiny negative number."""
        kl = tensor(-1e-17)
        assert pinsker_bound(kl).tolist() == [1.0]
        assert bretagnolle_huber_bound(kl).tolist() == [1.0]

    @property_test
    @given(st.one_of(distributions(), distributions(positive=True)))
    def test_neither_exceeds_the_acceptance(self, drawn):
        p, q = drawn
        acceptance = overlap(p, q).item()
        for kl in (kl_divergence(p, q), kl_divergence(q, p)):
            for bound in (pinsker_bound(kl).item(), bretagnolle_huber_bound(kl).item()):
                # Rounding of 1e-16 in the divergence is 1e-8 in its root.
                assert 0.0 <= bound <= acceptance + 2e-8

    @property_test
    @given(st.floats(0.0, 50.0))
    def test_which_is_tighter(self, kl):
        kl = tensor(kl)
        if kl > 1.6:
            assert bretagnolle_huber_bound(kl) >= pinsker_bound(kl)
        if kl < 1.59:
            assert bretagnolle_huber_bound(kl) <= pinsker_bound(kl) + 1e-12
        assert bretagnolle_huber_bound(kl) > 0 or kl > 30


def test_padding_rows_are_zero():
    """Padding of ragged drafts."""
    q = torch.zeros(2, 3, 4)
    c = torch.zeros(2, 3, 4)
    q[0, :2], c[0, :2] = 0.25, torch.tensor([0.5, 0.5, 0.0, 0.0])
    tokens = torch.tensor([[1, 2, 0], [0, 0, 0]])
    assert overlap(q, c).tolist() == [[0.5, 0.5, 0.0], [0.0] * 3]
    drawn = agreement(token_probabilities(q, tokens), token_probabilities(c, tokens))
    assert drawn.tolist() == [[1.0, 0.0, 0.0], [0.0] * 3]
    assert entropy(q)[0].tolist() == pytest.approx([math.log(4), math.log(4), 0.0])
    assert entropy(q)[1].tolist() == [0.0] * 3
