"""The kernel of random numbers against the definition in NumPy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core import random
from draftwise.kernels.native.library import kernel_in_use
from draftwise.kernels.native.sampling import step_uniforms

pytestmark = pytest.mark.skipif(
    kernel_in_use() != "native", reason="no native kernels on this machine"
)

requests = st.lists(
    st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=6
)


def tensors(uniforms):
    values = vars(uniforms) | dataclasses.asdict(uniforms.stage)
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@settings(deadline=None)
@given(requests, st.integers(0, 12))
def test_the_numbers_have_the_same_bits(requests, num_tokens):
    seeds, positions = map(list, zip(*requests, strict=True))
    expected = tensors(random.step_uniforms(seeds, positions, num_tokens))
    actual = tensors(step_uniforms(seeds, positions, num_tokens))
    assert actual.keys() == expected.keys()
    for name, numbers in expected.items():
        assert actual[name].dtype == numbers.dtype
        assert actual[name].shape == numbers.shape
        assert torch.equal(actual[name], numbers), name


def test_a_step_without_sampled_requests():
    assert step_uniforms([], [], 3).draft.shape == (0, 3)
