"""Distributions, draws and signals of the native kernels, compared with PyTorch's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core import sampling as plain
from draftwise.core.sampling import LogitControls
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.sampling import distributions, greedy_tokens, score_draft

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")


def controls(temperatures, top_k=None, top_p=None, min_p=None):
    count = len(temperatures)

    def tensor(value, dtype=torch.float32):
        return None if value is None else torch.full((count,), value, dtype=dtype)

    return LogitControls(
        torch.tensor(temperatures),
        all(t == 0 for t in temperatures),
        any(t == 0 for t in temperatures),
        tensor(top_k, torch.long),
        tensor(top_p),
        tensor(min_p),
    )


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    vocab = draw(st.sampled_from([1, 5, 16, 33, 300, 4096]))
    generator = np.random.default_rng(seed)
    sharpness = draw(st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    logits = torch.from_numpy(generator.normal(size=(6, vocab)) * sharpness).float()
    if draw(st.booleans()):  # ties, which occur in bfloat16
        logits = logits.bfloat16().float()
    if draw(st.booleans()):
        logits[:, vocab // 2 + 1 :] = float("-inf")
    parameters = controls(
        draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=3, max_size=3)),
        draw(st.sampled_from([None, 1, 3, 50, 10**6])),
        draw(st.sampled_from([None, 0.1, 0.9, 1.0])),
        draw(st.sampled_from([None, 0.02, 0.5])),
    )
    return logits, parameters


OWNER = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(cases(), st.booleans())
def test_distributions_and_draws_equal_those_of_pytorch(case, softens_greedy):
    logits, parameters = case
    function = plain.soft_probabilities if softens_greedy else plain.probabilities
    expected = function(logits, parameters.rows(OWNER))
    actual = distributions(native_library(), logits, parameters, OWNER, softens_greedy)
    torch.testing.assert_close(actual.sum(dim=1), torch.ones(6), atol=1e-5, rtol=0)
    # Rounding may put a token at the edge of the nucleus on either side.
    at_edge = torch.zeros(6, dtype=torch.bool)
    if parameters.top_p is not None:
        at_edge = ((actual > 0) != (expected > 0)).sum(dim=1) == 1
        assert (actual - expected).abs().max() < 0.5
    torch.testing.assert_close(actual[~at_edge], expected[~at_edge], atol=2e-6, rtol=2e-5)


def test_nan_and_infinite_logits():
    for number in [float("nan"), float("inf")]:
        for temperature in [0.0, 1.0]:
            logits = torch.zeros(2, 40)
            logits[0, 37] = number
            p = distributions(
                native_library(), logits, controls([temperature]), torch.zeros(2).long()
            )
            assert p[1].isfinite().all(), number
            if number == number and temperature == 0.0:
                assert p[0].argmax() == 37 or p[0].isnan().all(), number
            else:
                assert p[0].isnan().all(), number
            nothing = torch.full((1, 40), float("-inf"))
            p = distributions(native_library(), nothing, controls([1.0]), torch.zeros(1).long())
            assert p.isnan().all(), number


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([33, 700]), st.sampled_from([0, 5]))
def test_companion_scores_equal_those_of_pytorch(seed, vocab, missing):
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 0, 2]
    q = torch.rand(3, 5, vocab, generator=generator).softmax(dim=-1)[:, :4]
    q[0, 0, : vocab // 2] = 0.0
    tokens = torch.randint(0, vocab, (3, 3), generator=generator)
    logits = torch.randn(5, vocab - missing, generator=generator) * 3
    logits[4, 0] = float("nan")
    places = torch.tensor([(r, i) for r, length in enumerate(lengths) for i in range(length)])
    parameters = controls([1.0, 0.5, 0.7])
    c, s, a = score_draft(native_library(), logits, parameters, places, tokens, q)
    expected = torch.zeros(3, 3, vocab)
    wide = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    believed = plain.soft_probabilities(wide, parameters.rows(places[:, 0]))
    expected[places[:, 0], places[:, 1]] = believed.nan_to_num(nan=0.0)
    torch.testing.assert_close(c, expected, atol=1e-6, rtol=1e-5)
    drafted = torch.arange(3) < torch.tensor(lengths).unsqueeze(1)
    wanted = (
        overlap(q[:, :3], expected) * drafted,
        agreement(token_probabilities(q[:, :3], tokens), token_probabilities(expected, tokens))
        * drafted,
    )
    torch.testing.assert_close(s, wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a, wanted[1], atol=1e-5, rtol=1e-4)


def test_greedy_tokens_are_the_first_largest():
    for vocab in [1, 15, 300, 5000]:
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(7, vocab, generator=generator).round()  # with many ties
        logits[2] = float("-inf")
        logits[4, vocab // 2] = float("nan")
        logits[5, vocab - 1] = float("inf")
        tokens, is_nan = greedy_tokens(native_library(), logits)
        assert is_nan.tolist() == [False] * 4 + [True] + [False] * 2, vocab
        first = np.argmax(logits.numpy(), axis=1)
        assert torch.equal(tokens[~is_nan], torch.from_numpy(first)[~is_nan]), vocab


def test_filters_of_a_large_vocabulary():
    """Few and many tokens are kept, near the largest probability and far below it."""
    for top_k, top_p, min_p in [
        (40, None, None),
        (9000, None, None),
        (None, 0.5, None),
        (None, 0.999, None),
        (None, None, 1e-7),
    ]:
        for sharpness in [0.0, 3.0, 20.0]:
            generator = torch.Generator().manual_seed(1)
            logits = torch.randn(2, 20000, generator=generator) * sharpness
            parameters = controls([1.0, 0.7], top_k, top_p, min_p)
            owner = torch.tensor([0, 1])
            actual = distributions(native_library(), logits, parameters, owner)
            expected = plain.probabilities(logits, parameters)
            # PyTorch's cumulative sum has a rounding error of some 1e-6.
            at_edge = (actual > 0) != (expected > 0)
            assert torch.where(at_edge, actual + expected, 0.0).sum() < 1e-5, top_k
            torch.testing.assert_close(actual[~at_edge], expected[~at_edge], atol=2e-6, rtol=1e-4)
