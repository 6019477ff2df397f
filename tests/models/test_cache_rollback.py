"""After rollbacks, logits depend only on the tokens that were kept."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.errors import NumericalError
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..levels import exhaustive_unless
from ..tiny_models import Recipe

VOCAB = 16
CAPACITY = 96
NUM_CACHE_SLOTS = 6
RECIPES = {
    "llama": Recipe(vocab=VOCAB, context=CAPACITY, seed=1),
    "gpt2": Recipe("gpt2", vocab=VOCAB, context=CAPACITY, seed=1),
    "opt": Recipe("opt", vocab=VOCAB, context=CAPACITY, seed=1),
    "window": Recipe(
        "mistral", vocab=VOCAB, context=CAPACITY, seed=1, config={"sliding_window": 8}
    ),
    "gemma2": Recipe("gemma2", vocab=VOCAB, context=CAPACITY, seed=1),
    "gemma3": Recipe("gemma3_text", vocab=VOCAB, context=CAPACITY, seed=1),
    "gpt_oss": Recipe("gpt_oss", vocab=VOCAB, context=CAPACITY, seed=1),
    "olmo3": Recipe("olmo3", vocab=VOCAB, context=CAPACITY, seed=1),
}
# Layers with a window of 8 keep a ring of 64 tokens, which histories overwrite.
MAX_NEW_TOKENS = 45
property_test = settings(deadline=None, derandomize=True, max_examples=40)


@functools.cache
def _loaded(folder):
    return load_model(folder, "target", torch.float32, torch.device("cpu")).model


class Machine:
    """A model with a cache, and the token lists that its cache slots should represent."""

    def __init__(self, model, reference):
        self.model = model
        self.reference = reference
        self.cache = model.new_cache(NUM_CACHE_SLOTS, CAPACITY, MAX_NEW_TOKENS)
        self.texts = [[] for _ in range(NUM_CACHE_SLOTS)]

    @torch.inference_mode()
    def forward(self, new):
        """Feed ``{cache slot: tokens}`` and compare all logits with a forward without a cache."""
        segments = [Segment(slot, len(self.texts[slot]), len(new[slot])) for slot in sorted(new)]
        tokens = [token for slot in sorted(new) for token in new[slot]]
        logits = self.model.forward(self.cache, tokens, segments, range(len(tokens)))
        first = 0
        for slot in sorted(new):
            self.texts[slot] += new[slot]
            assert self.cache.lengths[slot] == len(self.texts[slot])
            count = len(new[slot])
            expected = self.reference(input_ids=torch.tensor([self.texts[slot]])).logits[0, -count:]
            torch.testing.assert_close(
                logits[first : first + count], expected, rtol=1e-3, atol=1e-3
            )
            first += count

    def truncate(self, slot, length):
        self.cache.truncate(slot, length)
        del self.texts[slot][length:]
        assert self.cache.lengths[slot] == len(self.texts[slot])

    def clear(self, slot):
        self.cache.clear(slot)
        self.texts[slot] = []


# A step feeds some cache slots (not always adjacent ones), then truncates or clears some.
pieces = st.one_of(st.just(1), st.just(1), st.integers(1, 6), st.integers(30, 45))
feeds = st.dictionaries(
    st.integers(0, NUM_CACHE_SLOTS - 1), pieces, min_size=1, max_size=NUM_CACHE_SLOTS
)
rollbacks = st.dictionaries(
    st.integers(0, NUM_CACHE_SLOTS - 1),
    st.one_of(st.integers(0, 8), st.sampled_from(["clear", "beyond"])),
    max_size=3,
)
histories = st.lists(st.tuples(feeds, rollbacks), min_size=1, max_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    exhaustive_unless(lambda name: name in ("llama", "gpt2", "window", "gpt_oss"), RECIPES),
)
@property_test
@given(histories, st.integers(0, 10**6))
def test_logits_depend_only_on_kept_tokens(models, family, history, seed):
    folder = models.folder(RECIPES[family])
    machine = Machine(_loaded(folder), models.reference(RECIPES[family]))
    generator = torch.Generator().manual_seed(seed)
    for feed, rollback in history:
        new = {}
        for slot, count in feed.items():
            count = min(count, CAPACITY - len(machine.texts[slot]))
            if count:
                new[slot] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
        if new:
            machine.forward(new)
        for slot, back in rollback.items():
            if back == "clear":
                machine.clear(slot)
            elif back == "beyond":
                machine.truncate(slot, len(machine.texts[slot]) + 3)
            else:
                machine.truncate(slot, max(0, len(machine.texts[slot]) - back))


def test_a_truncation_that_a_ring_cannot_undo_is_refused(models):
    recipe = RECIPES["window"]
    machine = Machine(_loaded(models.folder(recipe)), models.reference(recipe))
    assert machine.cache.sizes == [64, 64]
    machine.forward({1: [3] * 45})
    machine.forward({1: [2] * 45})
    with pytest.raises(ValueError, match="cannot be truncated to 20 tokens"):
        machine.truncate(1, 20)
    machine.truncate(1, 45)
    machine.forward({1: [1, 2, 3]})


@pytest.fixture
def machine(models):
    recipe = RECIPES["llama"]
    return Machine(_loaded(models.folder(recipe)), models.reference(recipe))


def test_a_cache_slot_can_be_filled_completely(machine):
    machine.forward({2: [3] * (CAPACITY - 1), 3: [1, 2]})
    machine.forward({2: [5], 3: [4]})
    machine.truncate(2, CAPACITY - 3)
    machine.forward({2: [7, 8, 9]})


def test_a_shorter_text_ignores_stale_keys_of_a_cleared_slot(machine):
    machine.forward({0: [1] * 20, 1: [2] * 21})
    machine.clear(1)
    # Slot 1 is read with the length of slot 0. Its stale keys must have no effect.
    machine.forward({0: [3], 1: [4] * 11})
    machine.forward({0: [5], 1: [6]})


def test_a_cleared_cache_slot_holds_no_stale_nans(machine):
    machine.forward({0: [1] * 12, 1: [2] * 12, 2: [3] * 12})
    token_slots = torch.arange(CAPACITY, CAPACITY + 12)
    for layer, shape in enumerate(machine.model.layers):
        for_keys = torch.full((12, shape.num_heads, shape.key_size), float("nan"))
        for_values = torch.full((12, shape.num_heads, shape.value_size), float("nan"))
        machine.cache.write(layer, token_slots, for_keys, for_values)
    machine.truncate(1, 4)
    machine.clear(1)
    machine.forward({0: [4], 1: [5] * 7, 2: [6]})


def test_a_model_with_nan_weights_is_refused(models, tmp_path):
    model = Recipe(vocab=VOCAB).build()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(NumericalError, match="no finite logits") as caught:
        load_model(str(tmp_path), "draft", torch.float32, torch.device("cpu"))
    assert caught.value.field == "draft"
