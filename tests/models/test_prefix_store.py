"""Stored prefixes: which are found, which are dropped, and that their contents are right."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.prefix_store import BLOCK_SIZE, PrefixStore

SHAPES = {
    "full": [LayerShape(2, 4, 4)],
    "window": [LayerShape(2, 4, 4), LayerShape(1, 8, 4, window=20)],
    "chunk": [LayerShape(1, 4, 4, chunk=32), LayerShape(1, 4, 8, window=50)],
}
CAPACITY, NEW_TOKENS = 400, 64


def new_cache(kind, num_slots=3):
    return KVCache(
        SHAPES[kind], num_slots, CAPACITY, torch.float32, torch.device("cpu"), NEW_TOKENS
    )


def contents(layer, text, positions):
    """Keys that depend on all tokens up to their position, as in a model."""
    history = torch.tensor(list(itertools.accumulate(text, lambda a, b: (a * 31 + b) % 9973)))
    return (history[positions].float() + 10000 * layer).view(-1, 1, 1)


def compute(cache, slot, text, end):
    """Write the tokens of a slot as a model does, in passes that fit the rings."""
    while (start := cache.lengths[slot]) < end:
        until = min(end, start + cache.max_new_tokens)
        positions = torch.arange(start, until)
        for layer, (shape, size) in enumerate(zip(cache.layers, cache.sizes, strict=True)):
            numbers = contents(layer, text, positions)
            keys, values = (
                numbers.expand(-1, shape.num_heads, width)
                for width in (shape.key_size, shape.value_size)
            )
            cache.write(layer, slot * size + positions % size, keys, values)
        cache.advance(slot, until)


def check(cache, slot, text):
    """All tokens that the next token attends to are right."""
    length = cache.lengths[slot]
    for layer, shape in enumerate(cache.layers):
        first = shape.first_visible(length)
        if first < length:
            expected = contents(layer, text, torch.arange(first, length))
            for numbers in cache.read_span(layer, slot, first, length):
                assert torch.equal(
                    numbers.transpose(0, 1), expected.expand(-1, *numbers[:, 0].shape)
                )


def test_a_stored_prefix_is_restored():
    for kind in SHAPES:
        cache = new_cache(kind)
        store = PrefixStore(cache, 100)
        text = list(range(150))
        store.begin(0)
        for end in (60, 110, 150):
            compute(cache, 0, text, end)
            store.store(0, text, "")
        assert len(store) == 150 // BLOCK_SIZE, kind
        other = [*text[:100], *range(500, 540)]
        store.begin(1)
        assert store.restore(1, other, "", len(other) - 1) == 96, kind
        check(cache, 1, other)
        compute(cache, 1, other, 140)
        check(cache, 1, other)


def test_other_salts_find_nothing():
    cache = new_cache("full")
    store = PrefixStore(cache, 100)
    text = list(range(64))
    compute(cache, 0, text, 64)
    store.store(0, text, "one")
    assert store.restore(1, text, "two", 63) == 0
    assert store.restore(1, text, "one", 63) == 48
    store.clear()
    assert store.restore(2, text, "one", 63) == 0


def test_a_slot_that_has_begun_gets_what_is_missing():
    cache = new_cache("window")
    store = PrefixStore(cache, 100)
    text = list(range(200))
    for end in (64, 128, 200):
        compute(cache, 0, text, end)
        store.store(0, text, "")
    store.begin(1)
    compute(cache, 1, text, 23)
    assert store.restore(1, text, "", 23) == 23
    assert store.restore(1, text, "", 199) == 192
    check(cache, 1, text)


def test_two_slots_with_the_same_text_share_blocks():
    """Also if both go on in the same steps, so that neither restores what the other stored."""
    cache = new_cache("full")
    store = PrefixStore(cache, 10)
    text = list(range(160))
    for end in (48, 64, 112, 160):
        for slot in (0, 1):
            compute(cache, slot, text, end)
        for slot in (0, 1):
            store.store(slot, text, "")
    assert len(store) == 10
    other = list(range(500, 660))
    compute(cache, 2, other, 160)
    store.store(2, other, "")
    assert len(store) == 10
    cache.clear(0)
    assert store.restore(0, other, "", 160) == 160
    check(cache, 0, other)


def test_the_least_recently_used_blocks_are_dropped():
    cache = new_cache("full")
    store = PrefixStore(cache, 4)
    first, second = list(range(48)), list(range(100, 148))
    compute(cache, 0, first, 48)
    store.store(0, first, "")
    assert store.restore(1, first, "", 33) == 32
    compute(cache, 2, second, 48)
    store.store(2, second, "")
    assert len(store) == 4
    cache.clear(1)
    assert store.restore(1, first, "", 48) == 16  # its last blocks were dropped first
    cache.clear(1)
    assert store.restore(1, second, "", 48) == 48
    check(cache, 1, second)


def test_a_text_longer_than_the_store_keeps_its_beginning():
    cache = new_cache("full")
    store = PrefixStore(cache, 3)
    text = list(range(100))
    compute(cache, 0, text, 100)
    store.store(0, text, "")
    assert store.restore(1, text, "", 99) == 48
    check(cache, 1, text)


def test_a_ring_that_was_overwritten_is_not_stored():
    cache = new_cache("window")
    store = PrefixStore(cache, 100)
    text = list(range(300))
    compute(cache, 0, text, 300)
    store.store(0, text, "")
    assert len(store) == 0


def test_an_interrupt_loses_no_memory_and_stores_nothing(monkeypatch):
    cache = new_cache("full")
    store = PrefixStore(cache, 5)
    text = list(range(64))
    compute(cache, 0, text, 64)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store._memory, "store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.store(0, text, "")
    assert store.restore(1, text, "", 63) == 0
    store.store(0, text, "")
    assert len(store) == 4
    assert store.restore(1, text, "", 63) == 48
    check(cache, 1, text)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(SHAPES)), st.integers(3, 40), st.integers(0, 2**32 - 1))
def test_any_history_restores_what_was_computed(kind, num_blocks, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(limit, (1,), generator=random))

    cache = new_cache(kind)
    store = PrefixStore(cache, num_blocks)
    roots = [[draw(3) for _ in range(CAPACITY)] for _ in range(2)]
    texts = {}
    for _ in range(25):
        slot = draw(3)
        if slot not in texts or cache.lengths[slot] > 300 or draw(4) == 0:
            cache.clear(slot)
            store.begin(slot)
            shared = draw(200)
            texts[slot] = [*roots[draw(2)][:shared], *[draw(3) for _ in range(CAPACITY - shared)]]
            store.restore(slot, texts[slot], "", 1 + draw(250))
        else:
            end = min(CAPACITY, cache.lengths[slot] + 1 + draw(80))
            compute(cache, slot, texts[slot], end)
            if draw(2):
                store.store(slot, texts[slot], "")
        check(cache, slot, texts[slot])
        assert len(store) <= num_blocks
