import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftwise.core.random import philox, step_uniforms

from .statistics_tools import chi_square_p_value

seeds = st.one_of(st.integers(0, 5), st.integers(-(2**63), 2**64 - 1))
positions = st.integers(0, 2**32 - 1)
property_test = settings(deadline=None, derandomize=True, max_examples=60)


def test_philox_known_answers():
    """The known-answer vectors of Random123 for philox4x32-10."""

    def words(text):
        return np.array([int(word, 16) for word in text.split()], dtype=np.uint64)

    for counter, key, expected in [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]:
        np.testing.assert_array_equal(philox(words(counter), words(key)), words(expected))


def test_philox_broadcasts_the_key():
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (5, 3, 4), dtype=np.uint64)
    key = rng.integers(0, 2**32, (5, 1, 2), dtype=np.uint64)
    words = philox(counter, key)
    for i, j in itertools.product(range(5), range(3)):
        np.testing.assert_array_equal(words[i, j], philox(counter[i, j], key[i, 0]))


@property_test
@given(
    st.lists(st.tuples(seeds, positions), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(0, 9),
    st.data(),
)
def test_numbers_do_not_depend_on_the_batch(requests, num_tokens, num_tokens_alone, data):
    batch = step_uniforms([s for s, _ in requests], [n for _, n in requests], num_tokens)
    which = data.draw(st.integers(0, len(requests) - 1))
    seed, position = requests[which]
    alone = step_uniforms([seed], [position], num_tokens_alone)
    common = min(num_tokens, num_tokens_alone)
    assert torch.equal(batch.draft[which, :common], alone.draft[0, :common])
    assert torch.equal(batch.accept[which, :common], alone.accept[0, :common])
    assert torch.equal(batch.final[which], alone.final[0])
    assert torch.equal(batch.stage.accept[which, :common], alone.stage.accept[0, :common])
    assert torch.equal(batch.stage.final[which, :common], alone.stage.final[0, :common])


@property_test
@given(st.lists(st.tuples(seeds, positions), max_size=4), st.integers(0, 5))
def test_shapes_types_and_range(requests, num_tokens):
    uniforms = step_uniforms([s for s, _ in requests], [n for _, n in requests], num_tokens)
    assert uniforms.draft.shape == uniforms.accept.shape == (len(requests), num_tokens)
    assert uniforms.stage.accept.shape == uniforms.stage.final.shape == uniforms.draft.shape
    assert uniforms.final.shape == (len(requests),)
    for numbers, dtype, bits in (
        (uniforms.draft, torch.float64, 53),
        (uniforms.accept, torch.float32, 24),
        (uniforms.final, torch.float64, 53),
        (uniforms.stage.accept, torch.float32, 24),
        (uniforms.stage.final, torch.float64, 53),
    ):
        assert numbers.dtype == dtype
        assert bool(((numbers >= 0) & (numbers < 1)).all())
        scaled = numbers.double() * 2**bits
        assert torch.equal(scaled, scaled.round())


def test_the_same_request_always_gets_the_same_numbers():
    """Pinned values: a seed must give the same text in every version."""
    uniforms = step_uniforms([42], [10], 2)
    words = philox(
        np.array(
            [[0, 10, 0, 0], [1, 10, 0, 0], [0, 10, 1, 0], [0, 10, 2, 0], [1, 10, 2, 0]],
            dtype=np.uint64,
        ),
        np.array([42, 0], dtype=np.uint64),
    )
    long = [((int(w[0]) << 32 | int(w[1])) >> 11) / 2**53 for w in words]
    assert uniforms.draft[0].tolist() == long[:2]
    assert uniforms.accept[0].tolist() == [(int(w[2]) >> 8) / 2**24 for w in words[:2]]
    assert uniforms.final[0].item() == long[2]
    assert uniforms.stage.accept[0].tolist() == [(int(w[2]) >> 8) / 2**24 for w in words[3:]]
    assert uniforms.stage.final[0].tolist() == long[3:]


def test_seeds_are_64_bits_wide_and_may_be_negative():
    a, b, c, d = step_uniforms([-1, 2**64 - 1, 2**32 - 1, 1], [3] * 4, 4).draft
    assert torch.equal(a, b)
    assert not torch.equal(a, c)  # the upper half counts
    assert not torch.equal(a, d)
    huge = step_uniforms([2**64 + 5, 5], [3, 3], 4).draft
    assert torch.equal(huge[0], huge[1])  # taken modulo 2**64


def all_numbers(num_seeds=400, num_positions=40, num_tokens=5):
    """``[seeds, positions, tokens, (draft, accept, final, stage accept, stage final)]``.

    The final number stands at every token.
    """
    pairs = list(itertools.product(range(num_seeds), range(num_positions)))
    uniforms = step_uniforms([s for s, _ in pairs], [n for _, n in pairs], num_tokens)
    final = uniforms.final.unsqueeze(1).expand(-1, num_tokens)
    stage = uniforms.stage
    together = [uniforms.draft, uniforms.accept, final, stage.accept, stage.final]
    shape = num_seeds, num_positions, num_tokens, len(together)
    return torch.stack([each.double() for each in together], dim=-1).reshape(shape).numpy()


NUMBERS = all_numbers()
DRAFT, ACCEPT, FINAL = NUMBERS[..., 0], NUMBERS[..., 1], NUMBERS[:, :, 0, 2]
STAGE_ACCEPT, STAGE_FINAL = NUMBERS[..., 3], NUMBERS[..., 4]


def test_numbers_are_uniform():
    for numbers in [DRAFT, ACCEPT, FINAL, STAGE_ACCEPT, STAGE_FINAL]:
        assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-4
        cells = np.bincount((numbers.ravel() * 64).astype(int), minlength=64)
        assert chi_square_p_value(cells, np.full(64, 1 / 64)) > 1e-4, numbers


PAIRS = {
    "neighbouring seeds": (DRAFT[:-1], DRAFT[1:]),
    "neighbouring seeds, accept": (ACCEPT[:-1], ACCEPT[1:]),
    "neighbouring seeds, final": (FINAL[:-1], FINAL[1:]),
    "neighbouring positions": (DRAFT[:, :-1], DRAFT[:, 1:]),
    "neighbouring positions, accept": (ACCEPT[:, :-1], ACCEPT[:, 1:]),
    "neighbouring positions, final": (FINAL[:, :-1], FINAL[:, 1:]),
    "neighbouring offsets": (DRAFT[:, :, :-1], DRAFT[:, :, 1:]),
    "neighbouring offsets, accept": (ACCEPT[:, :, :-1], ACCEPT[:, :, 1:]),
    "an offset and the next position": (DRAFT[:, :-1, 1:], DRAFT[:, 1:, :-1]),
    "draft and accept": (DRAFT, ACCEPT),
    "draft and final": (DRAFT[:, :, 0], FINAL),
    "accept and final": (ACCEPT[:, :, 0], FINAL),
    "accept and the next draft": (ACCEPT[:, :, :-1], DRAFT[:, :, 1:]),
    "final and the next position's draft": (FINAL[:, :-1], DRAFT[:, 1:, 0]),
    "draft and stage accept": (DRAFT, STAGE_ACCEPT),
    "draft and stage final": (DRAFT, STAGE_FINAL),
    "accept and stage accept": (ACCEPT, STAGE_ACCEPT),
    "accept and stage final": (ACCEPT, STAGE_FINAL),
    "final and stage accept": (FINAL, STAGE_ACCEPT[:, :, 0]),
    "final and stage final": (FINAL, STAGE_FINAL[:, :, 0]),
    "stage accept and stage final": (STAGE_ACCEPT, STAGE_FINAL),
    "stage final and the next stage accept": (STAGE_FINAL[:, :, :-1], STAGE_ACCEPT[:, :, 1:]),
    "neighbouring positions, stage": (STAGE_FINAL[:, :-1], STAGE_FINAL[:, 1:]),
}


def test_numbers_are_independent():
    for left, right in PAIRS.values():
        assert stats.pearsonr(left.ravel(), right.ravel()).pvalue > 1e-4
        cells = (left * 12).astype(int) * 12 + (right * 12).astype(int)
        counts = np.bincount(cells.ravel(), minlength=144)
        assert chi_square_p_value(counts, np.full(144, 1 / 144)) > 1e-4, left


def test_no_number_is_used_twice():
    """24 bits collide by chance; whole vectors of five numbers must not."""
    vectors = NUMBERS[..., :2].reshape(-1, 10)
    assert len(np.unique(vectors, axis=0)) == len(vectors)
    steps = np.moveaxis(NUMBERS[..., :2], 2, 0).reshape(-1, 2)
    # 80,000 pairs of 24-bit numbers: 1e-5 collisions expected.
    assert len(np.unique(steps, axis=0)) == len(steps)
