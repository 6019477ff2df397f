"""Attention over ragged segments with the native kernel and with PyTorch, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.kernels.native.library import native_library
from draftwise.models import packing
from draftwise.models.attention import attend
from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.packing import pack
from draftwise.models.segment import Segment

CPU = torch.device("cpu")
CAPACITY = 340
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

needs_kernel = pytest.mark.skipif(native_library() is None, reason="no kernel on this machine")
KERNELS = [pytest.param("native", marks=needs_kernel), "PyTorch"]


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(packing, "native_attention", lambda *_: None)
    return request.param


class Case:
    """A cache full of numbers and new tokens for it."""

    def __init__(self, segments, kv_heads=2, repeat=3, sizes=(16, 16), dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        self.segments = [Segment(*segment) for segment in segments]
        self.dtype, self.scaling = dtype, 1 / math.sqrt(sizes[0])
        rows = max(segment.cache_slot for segment in self.segments) + 1
        self.cache = KVCache([LayerShape(kv_heads, *sizes)], rows, CAPACITY, dtype, CPU)
        self.keys, self.values = self.cache.read(0, 0, rows, CAPACITY)
        self.keys.copy_(numbers(*self.keys.shape))
        self.values.copy_(numbers(*self.values.shape))
        tokens = sum(segment.num_tokens for segment in self.segments)
        self.q = numbers(tokens, kv_heads * repeat, sizes[0])
        self.k, self.v = numbers(tokens, kv_heads, sizes[0]), numbers(tokens, kv_heads, sizes[1])

    def expected(self):
        """``[tokens, heads, value_size]`` in float64."""
        keys, values = self.keys.double(), self.values.double()
        repeat = self.q.shape[1] // self.k.shape[1]
        results, token = [], 0
        for row, start, count in self.segments:
            for j in range(count):
                keys[row, :, start + j] = self.k[token].double()
                values[row, :, start + j] = self.v[token].double()
                seen_keys = keys[row, :, : start + j + 1].repeat_interleave(repeat, 0)
                seen_values = values[row, :, : start + j + 1].repeat_interleave(repeat, 0)
                scores = torch.einsum("hd,hld->hl", self.q[token].double(), seen_keys)
                weights = (scores * self.scaling).softmax(-1)
                results.append(torch.einsum("hl,hld->hd", weights, seen_values))
                token += 1
        return torch.stack(results)

    def actual(self):
        packed = pack(self.cache, self.segments, self.dtype, CPU)
        return attend(packed, 0, self.q, self.k, self.v, Scores(self.scaling))

    def check(self):
        expected = self.expected()
        actual = self.actual()
        assert actual.dtype == self.dtype
        assert actual.is_contiguous()
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
        token = 0
        for row, start, count in self.segments:
            span, new = slice(start, start + count), slice(token, token + count)
            assert torch.equal(self.keys[row, :, span].transpose(0, 1), self.k[new])
            assert torch.equal(self.values[row, :, span].transpose(0, 1), self.v[new])
            token += count


@st.composite
def ragged(draw):
    rows = sorted(draw(st.sets(st.integers(0, 8), min_size=1, max_size=6)))
    count = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 32))
    return [(row, draw(st.integers(0, 300)), draw(count)) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    ragged(),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([(64, 64), (128, 128), (32, 96), (1, 1), (20, 20), (64, 7), (33, 80)]),
    st.integers(0, 10**6),
)
@pytest.mark.parametrize("kind", KERNELS)
def test_equals_float64(kind, dtype, segments, kv_heads, repeat, sizes, seed):
    with pytest.MonkeyPatch.context() as patch:
        if kind == "PyTorch":
            patch.setattr(packing, "native_attention", lambda *_: None)
        Case(segments, kv_heads, repeat, sizes, dtype, seed).check()


def test_any_number_of_threads(kernel):
    for dtype in [torch.float32, torch.bfloat16]:
        for num_threads in [1, 2, 3]:
            before = torch.get_num_threads()
            torch.set_num_threads(num_threads)
            try:
                Case([(r, 37 * r, 1 + r % 3) for r in range(8)], 3, 4, (64, 64), dtype).check()
            finally:
                torch.set_num_threads(before)


def test_a_prompt_chunk_in_a_pass_with_decoding_requests(kernel):
    case = Case([(0, 100, 2), (1, 20, 50), (2, 0, 33), (3, 7, 1)])
    case.check()


def test_strided_queries_keys_and_values(kernel):
    """They are views of one joined projection, or not contiguous in the last dimension."""
    case = Case([(0, 40, 3), (1, 9, 1)])
    joined = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = joined.split([6, 2, 2], dim=1)
    case.check()
    case.q, case.k = (each.mT.contiguous().mT for each in (case.q, case.k))
    case.check()


def test_large_scores_do_not_overflow(kernel):
    case = Case([(0, 150, 2)])
    case.q *= 1e4
    case.check()


def test_scores_that_grow_with_each_block(kernel):
    """The weight of earlier sums decreases with each block."""
    for dtype in [torch.float32, torch.bfloat16]:
        case = Case([(0, 290, 3), (1, 70, 50)], sizes=(64, 64), dtype=dtype)
        growing = torch.arange(case.keys.shape[2]).to(dtype).view(1, 1, -1) / 8
        case.q[:, :, 0] = 1
        case.keys[..., 0] = growing
        case.k[..., 0] = torch.cat([torch.arange(290, 293), torch.arange(70, 120)])[:, None] / 8
        case.check()


@needs_kernel
class TestNonFiniteNumbers:
    def test_keys_beyond_the_length_are_not_read(self):
        for dtype in [torch.float32, torch.bfloat16]:
            case = Case([(0, 100, 2), (1, 33, 1)], dtype=dtype)
            for row, start, count in case.segments:
                case.keys[row, :, start + count :] = float("nan")
                case.values[row, :, start + count :] = float("nan")
            case.check()

    def test_nan_or_infinity_in_a_key(self):
        for number in [float("nan"), float("inf")]:
            for position in [0, 40, 99]:
                for dtype in [torch.float32, torch.bfloat16]:
                    case = Case([(0, 100, 2), (1, 100, 2)], sizes=(64, 64), dtype=dtype)
                    # Both queries have a positive score with an infinite key.
                    case.q[:, :, 3] = 1
                    case.keys[0, :, position, 3] = number
                    result = case.actual()
                    assert result[:2].isnan().all(), number
                    assert result[2:].isfinite().all(), number

    def test_nan_in_a_value(self):
        for dtype in [torch.float32, torch.bfloat16]:
            case = Case([(0, 100, 2), (1, 100, 2)], sizes=(64, 64), dtype=dtype)
            case.values[0, 1, 70, 5] = float("nan")
            result = case.actual()
            assert result[:2, 3:, 5].isnan().all(), dtype
            assert int(result.isnan().sum()) == 2 * 3, dtype

    def test_nan_in_a_query(self):
        for dtype in [torch.float32, torch.bfloat16]:
            case = Case([(0, 100, 2)], dtype=dtype)
            case.q[1, 2, 0] = float("nan")
            result = case.actual()
            assert result[1, 2].isnan().all(), dtype
            assert int(result.isnan().sum()) == result.shape[2], dtype

    def test_a_score_of_minus_infinity_has_no_weight(self):
        for position in (0, 40, 99):
            case = Case([(0, 100, 2)])
            case.q[:, :, 3] = 1
            case.keys[0, :, position, 3] = float("-inf")
            case.check()

    def test_minus_infinity_for_all_keys_gives_nan(self):
        case = Case([(0, 0, 1)])
        case.q[:, :, 3] = 1
        case.k[:, :, 3] = float("-inf")
        assert case.actual().isnan().all()


@needs_kernel
class TestRefusals:
    def test_a_position_outside_the_cache(self):
        case = Case([(0, 100, 2)])
        for segment in [Segment(1, 0, 1), Segment(0, CAPACITY, 1), Segment(0, -1, 1)]:
            with pytest.raises(ValueError, match="have no place"):
                pack(case.cache, [segment], case.dtype, CPU)

    def test_shapes_that_do_not_match_the_cache(self):
        case = Case([(0, 100, 2)])
        packed = pack(case.cache, case.segments, case.dtype, CPU)
        for q, k, v in [
            (case.q[:1], case.k, case.v),
            (case.q, case.k[:, :1], case.v),
            (case.q, case.k, case.v[:, :, :3]),
            (case.q.double(), case.k, case.v),
            (case.q[:, :5], case.k, case.v),
        ]:
            with pytest.raises(ValueError, match="other shapes or types"):
                attend(packed, 0, q, k, v, None)

    def test_types_without_a_kernel_use_pytorch(self):
        case = Case([(0, 100, 2)], dtype=torch.float16)
        assert pack(case.cache, case.segments, torch.float16, CPU).native is None
        assert pack(case.cache, case.segments, torch.float16, CPU).groups
