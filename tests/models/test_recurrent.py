"""Recurrent states and convolutions have the same bits, however many tokens are accepted."""

import random

import pytest
import torch

from draftwise.kernels.native.library import native_library
from draftwise.models.recurrent import computation
from draftwise.models.recurrent.cache import MAX_ROWS, RecurrentCache
from draftwise.models.recurrent.computation import RecurrentPass
from draftwise.models.recurrent.shapes import (
    PER_HEAD,
    PER_KEY,
    PER_NUMBER,
    ConvolutionShape,
    RecurrentShapes,
    StateShape,
)
from draftwise.models.segment import Segment

CPU = torch.device("cpu")
LENGTH = 160
WIDTH = 4
CHANNELS = 32
# A state of several vectors, and one whose columns are no whole vectors.
STATES = [
    (StateShape(2, 16, 64), True),
    (StateShape(3, 8, 20, PER_KEY), True),
    (StateShape(2, 8, 33), False),
    (StateShape(1, 4, 40, PER_NUMBER), False),
]


class Inputs:
    """What a layer computes from each token of a text, which no other token changes."""

    def __init__(self, shape, has_delta, seed):
        generator = torch.Generator().manual_seed(seed)

        def normal(*sizes):
            return torch.randn(LENGTH, *sizes, generator=generator)

        self.decay = torch.exp(-normal(shape.heads, shape.decay_size).abs() / 4)
        self.key = torch.nn.functional.normalize(normal(shape.heads, shape.keys), dim=2)
        self.value = normal(shape.heads, shape.values)
        self.query = normal(shape.heads, shape.keys)
        self.beta = torch.sigmoid(normal(shape.heads)) if has_delta else None
        self.channels = normal(CHANNELS)

    def at(self, positions):
        whole = (self.decay, self.key, self.value, self.query, self.beta)
        return [None if each is None else each[positions] for each in whole]


class Layer:
    """A recurrence and a convolution with the states of several requests."""

    def __init__(self, shape, num_slots):
        shapes = RecurrentShapes((shape,), (ConvolutionShape(CHANNELS, WIDTH),))
        self.cache = RecurrentCache(shapes, num_slots, torch.float32, CPU)
        self.weight = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(9))
        self.bias = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(8))

    def run(self, segments, texts):
        """Outputs of each segment, by the texts of the slots: lists of (input, position)."""
        segments = [Segment(*each) for each in segments]
        self.cache.begin_pass(segments)
        own = RecurrentPass(self.cache, segments)
        parts = [texts[slot].at(slice(start, start + count)) for slot, start, count in segments]
        joined = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
        channels = torch.cat(
            [texts[slot].channels[start : start + count] for slot, start, count in segments]
        )
        out = own.recur(*joined)
        mixed = own.convolve(channels, self.weight, self.bias)
        counts = [count for _, _, count in segments]
        return list(zip(out.split(counts), mixed.split(counts), strict=True))

    def truncate(self, slot, length):
        assert self.cache.can_truncate(slot, length)
        self.cache.settle(slot, length)


def one_by_one(shape, text):
    """The outputs of each token of a text, read alone."""
    layer, outputs = Layer(shape, 1), []
    for position in range(LENGTH):
        outputs += layer.run([(0, position, 1)], [text])
        layer.truncate(0, position + 1)
    return outputs


def equal(parts, expected, start):
    outs, mixed = parts
    return all(
        torch.equal(out, expected[start + at][0][0])
        and torch.equal(row, expected[start + at][1][0])
        for at, (out, row) in enumerate(zip(outs, mixed, strict=True))
    )


def with_rejected(text, wrong, start, count, num_right):
    """A text whose tokens after the first ``num_right`` of a segment are those of another text."""
    mixed = Inputs.__new__(Inputs)
    for name, value in vars(text).items():
        other = getattr(wrong, name)
        if value is not None:
            value = value.clone()
            value[start + num_right : start + count] = other[start + num_right : start + count]
        setattr(mixed, name, value)
    return mixed


def speculate(shape, has_delta, seed, layer=None):
    """Read texts with drafts, some of which are rejected; returns whether all outputs are equal.

    Three requests are drafted for, in an order that changes, with prompts, and with steps without
    drafts between.
    """
    numbers, num_slots = random.Random(seed), 3
    texts = [Inputs(shape, has_delta, 10 * seed + slot) for slot in range(num_slots)]
    wrong = [Inputs(shape, has_delta, 10 * seed + slot + 5) for slot in range(num_slots)]
    expected = [one_by_one(shape, text) for text in texts]
    layer = layer or Layer(shape, num_slots)
    lengths, same = [0] * num_slots, True
    while min(lengths) < LENGTH:
        slots = [slot for slot in range(num_slots) if lengths[slot] < LENGTH]
        numbers.shuffle(slots)
        slots = slots[: numbers.randint(1, len(slots))]
        segments, given, kept = [], list(texts), {}
        for slot in slots:
            start = lengths[slot]
            is_prompt = start == 0 and slot != 1
            count = numbers.choice([1, 5, 70]) if is_prompt else numbers.choice([1, 1, 2, 6, 17])
            count = min(count, LENGTH - start)
            kept[slot] = count if is_prompt else numbers.randint(1, count)
            segments.append((slot, start, count))
            given[slot] = with_rejected(texts[slot], wrong[slot], start, count, kept[slot])
        for (slot, start, _), parts in zip(segments, layer.run(segments, given), strict=True):
            num_kept = kept[slot]
            same &= equal([each[:num_kept] for each in parts], expected[slot], start)
            lengths[slot] = start + num_kept
            layer.truncate(slot, lengths[slot])
    return same


@pytest.fixture(params=["native", "PyTorch"])
def backend(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(computation, "library_for", lambda device: None)
    elif native_library() is None:
        pytest.skip("this machine has no native kernels")


@pytest.mark.parametrize(("shape", "has_delta"), STATES)
def test_outputs_have_the_bits_of_one_token_steps(backend, shape, has_delta):
    for seed in range(4):
        assert speculate(shape, has_delta, seed)


@pytest.mark.parametrize(("shape", "has_delta"), STATES)
def test_every_accepted_length_leaves_the_same_state(backend, shape, has_delta):
    text, wrong = Inputs(shape, has_delta, 1), Inputs(shape, has_delta, 2)
    single = Layer(shape, 1)
    states, rings = [], []
    for position in range(20):
        single.run([(0, position, 1)], [text])
        single.truncate(0, position + 1)
        single.run([(0, position + 1, 0)], [text])  # the state advances to the position
        states.append(single.cache.states[0][0].clone())
        rings.append(single.cache.inputs[0][0].clone())
    for num_kept in range(1, 9):
        layer = Layer(shape, 1)
        layer.run([(0, 0, 5)], [text])
        layer.truncate(0, 5)
        layer.run([(0, 5, 8)], [with_rejected(text, wrong, 5, 8, num_kept)])
        layer.truncate(0, 5 + num_kept)
        layer.run([(0, 5 + num_kept, 0)], [text])
        assert torch.equal(layer.cache.states[0][0], states[4 + num_kept])
        recent = (
            torch.arange(5 + num_kept - WIDTH + 1, 5 + num_kept) % layer.cache.inputs[0].shape[1]
        )
        assert torch.equal(layer.cache.inputs[0][0, recent], rings[4 + num_kept][recent])


@pytest.mark.parametrize(("shape", "has_delta"), STATES)
def test_the_recurrence_is_that_of_its_definition(backend, shape, has_delta):
    text = Inputs(shape, has_delta, 3)
    ((out, mixed),) = Layer(shape, 1).run([(0, 0, 40)], [text])
    state = torch.zeros(shape.heads, shape.keys, shape.values, dtype=torch.float64)
    sizes = {PER_HEAD: (1, 1), PER_KEY: (shape.keys, 1), PER_NUMBER: (shape.keys, shape.values)}
    for at in range(40):
        decay, key, value, query = (
            each[at].double() for each in (text.decay, text.key, text.value, text.query)
        )
        state = state * decay.view(-1, *sizes[shape.decays])
        if has_delta:
            value = text.beta[at].double()[:, None] * (
                value - torch.einsum("hkv,hk->hv", state, key)
            )
        state = state + torch.einsum("hk,hv->hkv", key, value)
        expected = torch.einsum("hkv,hk->hv", state, query)
        assert (out[at] - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
    weight = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(9))
    bias = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(8))
    padded = torch.nn.functional.pad(text.channels[:40].T, (WIDTH - 1, 0))
    expected = torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=CHANNELS)[0].T
    assert torch.allclose(mixed, expected, atol=1e-5)


def test_drafts_of_many_passes_are_rolled_back(backend):
    """A draft model reads its own tokens one by one before any of them is accepted."""
    shape, has_delta = STATES[0]
    text, wrong = Inputs(shape, has_delta, 4), Inputs(shape, has_delta, 5)
    expected, layer = one_by_one(shape, text), Layer(shape, 1)
    layer.run([(0, 0, 10)], [text])
    length = 10
    layer.truncate(0, length)
    for num_right in (0, 3, 6, 1):
        for at in range(6):
            layer.run([(0, length + at, 1)], [text if at < num_right else wrong])
        length += num_right
        layer.truncate(0, length)
        (parts,) = layer.run([(0, length, 2)], [text])
        assert equal(parts, expected, length)
        length += 2
        layer.truncate(0, length)


def test_a_long_prompt_keeps_few_rows_and_refuses_to_be_rolled_back_further(backend):
    shape, has_delta = STATES[0]
    layer, text = Layer(shape, 1), Inputs(shape, has_delta, 6)
    layer.run([(0, 0, MAX_ROWS + 40)], [text])
    assert layer.cache.can_truncate(0, MAX_ROWS + 35)
    assert not layer.cache.can_truncate(0, 20)
    layer.cache.clear(0)
    assert layer.cache.can_truncate(0, 0)
    assert not layer.cache.states[0].any()


# What other engines got wrong, by what it does to the cache.
def stale_state(monkeypatch):
    """The state of a step without drafts is that before the last step."""
    own = RecurrentCache.plan

    def plan(self, index, segments):
        planned = own(self, index, segments)
        for row in planned:
            if row[2] == 1:
                row[1] = min(row[1], self.bases[index, row[0]])
        return planned

    monkeypatch.setattr(RecurrentCache, "plan", plan)


def state_of_the_whole_draft(monkeypatch):
    """The state keeps what rejected tokens did to it."""
    own = RecurrentCache.plan

    def plan(self, index, segments):
        planned = own(self, index, segments)
        for row in planned:
            row[3] = row[1] + row[2]
        return planned

    monkeypatch.setattr(RecurrentCache, "plan", plan)
    monkeypatch.setattr(RecurrentCache, "can_truncate", lambda *_: True)
    monkeypatch.setattr(
        RecurrentCache,
        "settle",
        lambda self, slot, length: self.bases.__setitem__((0, slot), length),
    )


def convolution_that_is_not_rolled_back(monkeypatch):
    """A convolution continues after the rejected inputs."""
    own = RecurrentPass.convolve
    ends = {}

    def convolve(self, inputs, weight, bias):
        moved = []
        for slot, start, count in self.segments:
            begin = max(start, ends.get(slot, 0)) if start else 0
            ends[slot] = begin + count
            moved.append(Segment(slot, begin, count))
        kept, self.segments = self.segments, moved
        try:
            return own(self, inputs, weight, bias)
        finally:
            self.segments = kept

    monkeypatch.setattr(RecurrentPass, "convolve", convolve)


def permuted_counts(monkeypatch):
    """What was accepted is applied to the requests in another order."""
    own = RecurrentCache.settle

    def settle(self, slot, length):
        own(self, slot, max(0, length - 1 - slot))

    monkeypatch.setattr(RecurrentCache, "settle", settle)
    plan = RecurrentCache.plan

    def shifted(self, index, segments):
        planned = plan(self, index, segments)
        for row in planned:
            row[1] = max(row[1] - (row[0] == 1 and row[1] > self.bases[index, row[0]]), 0)
        return planned

    monkeypatch.setattr(RecurrentCache, "plan", shifted)


@pytest.mark.parametrize(
    "inject",
    [stale_state, state_of_the_whole_draft, convolution_that_is_not_rolled_back, permuted_counts],
)
def test_known_bugs_of_other_engines_are_noticed(monkeypatch, inject):
    shape, has_delta = STATES[0]
    texts_before = speculate(shape, has_delta, 1)
    assert texts_before
    with monkeypatch.context() as patched:
        expected = one_by_one  # computed without the bug
        known = {}
        for seed in (1, 2):
            for slot in range(3):
                text = Inputs(shape, has_delta, 10 * seed + slot)
                known[10 * seed + slot] = expected(shape, text)
        reads = iter(sorted(known))
        patched.setattr("tests.models.test_recurrent.one_by_one", lambda *_: known[next(reads)])
        inject(patched)
        assert not all(speculate(shape, has_delta, seed) for seed in (1, 2))
