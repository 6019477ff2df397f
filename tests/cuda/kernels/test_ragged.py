"""Attention of packed tokens to every kind of layer, in float32 against one token at a time."""

import itertools

import pytest
import torch

from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.ragged import (
    FlashAttention,
    FusedAttention,
    RaggedKernels,
    TokenwiseAttention,
)
from draftwise.models.segment import Segment
from draftwise.models.step_inputs import StepInputs
from draftwise.models.tree_tokens import SegmentTree, tree_tokens, whole_tree

from ..placing import NEEDS_CUDA, NEEDS_TRITON, TRITON_DEVICE

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
CAPACITY = 150
# Requests of one token, of several, at the beginning, at the end, and where a ring has wrapped.
CASES = {
    "one each": [(0, 3, 1), (2, 0, 1), (3, 149, 1)],
    "several": [(0, 3, 5), (1, 0, 17), (3, 146, 4)],
    "one and several": [(1, 130, 1), (2, 60, 9), (3, 0, 1)],
}
# With and without rings: of 64 and of 128 tokens.
LIMITS = {
    "all": {},
    "window": {"window": 5},
    "wide window": {"window": 70},
    "chunks": {"chunk": 8},
    "window in chunks": {"window": 6, "chunk": 32},
}
SINKS = torch.linspace(-2.0, 3.0, 6)
SCORES = {
    "plain": Scores(),
    "scaled": Scores(0.7),
    "capped": Scores(0.9, softcap=2.0),
    "with sinks": Scores(sinks=SINKS),
    "capped, with sinks": Scores(1.5, softcap=1.0, sinks=SINKS),
}


def filled_cache(device, dtype, shape, rows=4, capacity=CAPACITY, max_new_tokens=20):
    cache = KVCache([shape], rows, capacity, dtype, device, max_new_tokens)
    for each in cache.token_slots(0):
        each.copy_(torch.randn(each.shape, device=device))
    return cache


def ragged(cache, segments, kind):
    """The attention of segments ``(row, start, count)`` as either kind."""
    device, capacity = cache.device, cache.capacity
    if kind is not TokenwiseAttention:
        ends = torch.tensor([0, *(s[2] for s in segments)]).cumsum(0)
        first = torch.tensor([*(s[0] * capacity for s in segments), 0])
        keys = torch.tensor([s[1] + s[2] for s in segments])
        numbers = (each.int().to(device) for each in (ends, first, keys))
        return kind(*numbers, max(s[2] for s in segments), capacity)
    tokens = [(row * capacity, start + i + 1) for row, start, n in segments for i in range(n)]
    first, keys = torch.tensor(tokens).T.to(device)
    return TokenwiseAttention(first, keys, capacity)


def by_hand(cache, segments, q, scores, trees=None):
    """The same, request by request and token by token, in float32.

    A token attends to the tokens before it and to itself; in a tree to the text before the tree, to
    its ancestors and to itself.
    """
    keys, values = (each.float() for each in cache.token_slots(0))
    shape, size, repeat = cache.layers[0], cache.sizes[0], q.shape[1] // keys.shape[1]
    scaling = q.shape[2] ** -0.5 if scores.scaling is None else scores.scaling
    out = []
    for (row, start, count), tree in zip(segments, trees or [None] * len(segments), strict=True):
        for at in range(count):
            position = start + at
            seen = list(range(position + 1))
            if tree is not None:
                position = tree.root + tree.depths[at]
                path = [tree.root + bit for bit in range(64) if tree.ancestors[at] >> bit & 1]
                seen = [*range(tree.root), *path]
            seen = [each for each in seen if each >= shape.first_visible(position)]
            slots = row * size + torch.tensor(seen, device=q.device) % size
            k, v = (each[slots].repeat_interleave(repeat, 1) for each in (keys, values))
            logits = torch.einsum("hd,khd->hk", q[len(out)].float(), k) * scaling
            if scores.softcap is not None:
                logits = scores.softcap * torch.tanh(logits / scores.softcap)
            if scores.sinks is not None:
                logits = torch.cat((logits, scores.sinks.to(q.device).unsqueeze(1)), dim=1)
            weights = logits.softmax(dim=1)[:, : len(seen)]
            out.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(out)


def on(device, scores):
    return scores._replace(sinks=None if scores.sinks is None else scores.sinks.to(device))


def check(kind, device, limits, scores, segments, size=16):
    cache = filled_cache(device, torch.float32, LayerShape(2, size, size, **limits))
    assert (cache.sizes[0] < CAPACITY) == bool(limits)
    q = torch.randn(sum(s[2] for s in segments), 6, size, device=device)
    out = ragged(cache, segments, kind).attend(cache, 0, q, on(device, scores))
    torch.testing.assert_close(out, by_hand(cache, segments, q, scores), rtol=1e-4, atol=1e-4)


@pytest.mark.covering("limits", "scores", "segments")
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_tokenwise_attention(device, limits, scores, segments):
    check(TokenwiseAttention, torch.device(device), limits, scores, segments)


@NEEDS_TRITON
@pytest.mark.covering("limits", "scores", "segments")
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_the_own_kernel(limits, scores, segments):
    check(FusedAttention, TRITON_DEVICE, limits, scores, segments)


# The last of them has smaller blocks.
@NEEDS_TRITON
@pytest.mark.covering("limits", "size")
@pytest.mark.parametrize("limits", [LIMITS["all"], LIMITS["window"]], ids=["all", "window"])
@pytest.mark.parametrize("size", [4, 10, 96, 256])
def test_sizes_of_heads(size, limits):
    check(FusedAttention, TRITON_DEVICE, limits, Scores(0.2), CASES["several"], size)


# Many requests fill the device by themselves; the keys of a few are split.
@NEEDS_TRITON
@pytest.mark.covering("limits", "rows")
@pytest.mark.parametrize("limits", [{}, {"window": 300}], ids=["all", "window"])
@pytest.mark.parametrize(("rows", "capacity"), [(1, 2000), (3, 700), (40, 300)])
def test_numbers_of_requests(rows, capacity, limits):
    shape = LayerShape(2, 64, 64, **limits)
    cache = filled_cache(TRITON_DEVICE, torch.float32, shape, rows, capacity)
    segments = [(row, (row * 97) % (capacity - 20), 1 + (row * 5) % 20) for row in range(rows)]
    segments[0] = (0, capacity - 7, 7)
    q = torch.randn(sum(s[2] for s in segments), 6, 64, device=TRITON_DEVICE)
    out = ragged(cache, segments, FusedAttention).attend(cache, 0, q, Scores())
    expected = by_hand(cache, segments, q, Scores())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@NEEDS_TRITON
def test_padding_requests_read_the_spare_slot():
    """They have a token each where every request has one."""
    cache = filled_cache(TRITON_DEVICE, torch.float32, LayerShape(2, 16, 16, window=5))
    for each in cache.token_slots(0):
        each[:-1].fill_(float("nan"))
    numbers = ([0, 1, 2], [cache.spare_token_slot] * 3, [1, 1])
    ends, first, keys = (torch.tensor(each, device=TRITON_DEVICE).int() for each in numbers)
    q = torch.randn(2, 6, 16, device=TRITON_DEVICE)
    out = FusedAttention(ends, first, keys, 1, CAPACITY).attend(cache, 0, q, Scores())
    spare = cache.token_slots(0)[1][-1].repeat_interleave(3, 0)
    torch.testing.assert_close(out, spare.expand(2, 6, 16), rtol=1e-5, atol=1e-5)


# Requests with a tree of several sizes, one with a chain, and one whose tree goes on after tokens
# that are in the cache.
TREES = {
    0: (3, [-1, -1, 0, 0, 1, 2, 2, 6, 5]),
    1: (60, [-1, 0, 0, -1, 3, 3, 3, 1, 1, 8, 9, 10, 2, 12, 13, 14]),
    3: (75, [*[-1] * 20, *range(20), *range(20), 0, 1, 2]),
}
CHAIN = Segment(2, 100, 3)
GOES_ON = 7


def placed_trees():
    """Segments, and the tree of each."""
    segments, trees = [], []
    for row, (start, parents) in TREES.items():
        whole, first = whole_tree(start, parents), GOES_ON if row == 1 else 0
        segments.append(Segment(row, start + first, len(parents) + 1 - first))
        trees.append(SegmentTree(start, whole.depths[first:], whole.ancestors[first:]))
    segments.insert(2, CHAIN)
    trees.insert(2, None)
    return segments, trees


def planned_attention(cache, segments, trees):
    """The attention of a pass of these segments, padded as steps of fixed sizes are."""
    total = sum(segment.num_tokens for segment in segments)
    inputs = StepInputs(cache, total + 5, len(segments) + 1, has_trees=True)
    inputs.fill([0] * total, segments, tree_tokens(segments, trees))
    longest = max(segment.num_tokens for segment in segments)
    return inputs.plan(cache, RaggedKernels(True, True), longest)[1]


@NEEDS_TRITON
@pytest.mark.covering("limits", "scores")
@pytest.mark.parametrize("scores", [Scores(), Scores(softcap=2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_tokens_of_trees_attend_to_their_paths(limits, scores):
    shape = LayerShape(2, 16, 16, **limits)
    cache = filled_cache(TRITON_DEVICE, torch.float32, shape, max_new_tokens=64)
    segments, trees = placed_trees()
    packed = planned_attention(cache, segments, trees)
    q = torch.randn(len(packed.positions), 6, 16, device=TRITON_DEVICE)
    out = packed.ragged.attend(cache, 0, q, scores)
    expected = by_hand(cache, segments, q, scores, trees)
    torch.testing.assert_close(out[: len(expected)], expected, rtol=1e-4, atol=1e-4)
    positions = tree_tokens(segments, trees)["position"].tolist()
    assert packed.positions[: len(expected)].tolist() == positions


@NEEDS_TRITON
def test_many_trees_fill_the_device():
    """The keys of many requests are not split."""
    parents = [-1, 0, 0, 1, 1, 2]
    cache = filled_cache(TRITON_DEVICE, torch.float32, LayerShape(2, 16, 16), 20, 120)
    segments = [Segment(row, 5 * row, len(parents) + 1) for row in range(20)]
    trees = [whole_tree(segment.start, parents) for segment in segments]
    packed = planned_attention(cache, segments, trees)
    q = torch.randn(len(packed.positions), 2, 16, device=TRITON_DEVICE)
    out = packed.ragged.attend(cache, 0, q, Scores())
    expected = by_hand(cache, segments, q, Scores(), trees)
    torch.testing.assert_close(out[: len(expected)], expected, rtol=1e-4, atol=1e-4)


@NEEDS_CUDA
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    "kernel", list(itertools.product([FlashAttention, FusedAttention], LIMITS.values()))
)
@pytest.mark.covering("kernel", "heads", "segments")
def test_kernels_in_bfloat16(kernel, segments, heads):
    kind, limits = kernel
    shape = LayerShape(2, 64, 64, **limits)
    assert RaggedKernels.of(CUDA, torch.bfloat16, [shape]) == RaggedKernels(True, True)
    cache = filled_cache(CUDA, torch.bfloat16, shape)
    q = torch.randn(sum(s[2] for s in segments), heads, 64, device=CUDA, dtype=torch.bfloat16)
    out = ragged(cache, segments, kind).attend(cache, 0, q, Scores())
    expected = by_hand(cache, segments, q, Scores())
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
