"""Whole passes with native kernels, compared with PyTorch's operations."""

from dataclasses import replace

import pytest
import torch

from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.kernels.native.library import native_library
from draftwise.models import pretrained
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..refusals import error_of
from ..tiny_models import Recipe
from .passes import assert_same_with_any_threads, logits_of, rms_error

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
# No size is a multiple of the vector width.
ODD = {"hidden_size": 45, "intermediate_size": 37, "num_attention_heads": 3, "head_dim": 6}
# All sizes are multiples of a tile of the matrix unit.
TILED = Recipe("llama", 71, config={"hidden_size": 128, "head_dim": 64, "intermediate_size": 192})
RECIPES = [
    Recipe("llama", 32),
    Recipe("llama", 45, config={**ODD, "num_key_value_heads": 1}),
    Recipe("llama", 70, config={**ODD, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    Recipe("llama", 33, config={"hidden_size": 128, "head_dim": 64, "intermediate_size": 200}),
    Recipe(
        "llama",
        33,
        config={"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    TILED,
    Recipe("mistral", 32),
    Recipe("qwen2", 32),
    Recipe("qwen3", 32),
    Recipe("gemma", 32),
    Recipe("gemma2", 32),
    Recipe("gemma3_text", 32),
    Recipe("gemma3_text", 35, config={"head_dim": 64, "hidden_size": 64}),
    Recipe("phi3", 32),
    Recipe("phi3", 33, config={"head_dim": 8, "partial_rotary_factor": 0.5}),
    Recipe("olmo2", 32),
    Recipe("olmo3", 32),
    Recipe("granite", 32),
    Recipe("smollm3", 32, config={"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
]


def load(models, recipe, dtype, native=True):
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(pretrained, "native_pass", lambda _: None)
        model = load_model(models.folder(recipe), "target", dtype, CPU).model
    assert isinstance(model.native, NativeDecoder) is native
    return model


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_work_stealing_does_not_change_results(models, dtype):
    """A thread that has finished its share takes pieces of the other shares."""
    recipe = Recipe(
        "llama", 2048, config={"hidden_size": 128, "head_dim": 64, "intermediate_size": 1344}
    )
    model = load(models, recipe, dtype)
    tokens = torch.randint(0, recipe.vocab, (40,)).tolist()
    segments = [Segment(0, 0, 33), Segment(1, 0, 7)]

    def compute():
        return model.forward(model.new_cache(2, 64), tokens, segments, list(range(40)))

    # The assignment of pieces is random.
    assert_same_with_any_threads(compute, repeats=20)


@torch.inference_mode()
@pytest.mark.covering("recipe", "dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.family}-{recipe.vocab}")
def test_logits_of_steps_of_every_shape(models, recipe, dtype):
    """Any subset of slots, one or more tokens per slot, and rollbacks."""
    ours, theirs = (load(models, recipe, dtype, native) for native in (True, False))
    caches = [model.new_cache(6, 64) for model in (ours, theirs)]
    lengths = [0] * 6
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        rows = sorted(torch.randperm(6, generator=generator)[: 1 + step % 6].tolist())
        counts = [1 + (step * row) % (20 if step % 7 == 0 else 4) for row in rows]
        for row in rows:
            if lengths[row] > 40:
                lengths[row] = 5
                for cache in caches:
                    cache.truncate(row, 5)
        tokens = torch.randint(0, recipe.vocab, (sum(counts),), generator=generator).tolist()
        segments = [Segment(row, lengths[row], n) for row, n in zip(rows, counts, strict=True)]
        wanted = list(range(len(tokens)))[:: 1 + step % 3]
        got, expected = (
            model.forward(cache, tokens, segments, wanted)
            for model, cache in zip((ours, theirs), caches, strict=True)
        )
        assert got.shape == (len(wanted), recipe.vocab)
        assert rms_error(got, expected) < TOLERANCE[dtype], step
        for row, n in zip(rows, counts, strict=True):
            lengths[row] += n
            assert caches[0].lengths[row] == lengths[row]


@pytest.mark.covering("recipe", "dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES[1:4], TILED], ids=lambda recipe: f"{recipe.vocab}")
def test_results_of_a_token_do_not_depend_on_the_batch(models, recipe, dtype):
    """Its results are the same bit by bit, whichever other tokens are in the pass."""
    model = load(models, recipe, dtype)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, recipe.vocab, (30, 39), generator=generator).tolist()
    cache = model.new_cache(30, 39)
    segments = [Segment(row, 0, 39) for row in range(30)]
    tokens = [token for text in texts for token in text]
    together = model.forward(cache, tokens, segments, range(30 * 39)).unflatten(0, (30, 39))
    for row in range(4):
        alone = logits_of(model, texts[row], [1, 1, 2, 3, 1, 4, 5, 6, 1, 7, 8])
        assert torch.equal(alone, together[row].float())


def test_a_pass_without_logits(models):
    model = load(models, RECIPES[0], torch.float32)
    cache = model.new_cache(1, 16)
    assert model.forward(cache, [1, 2, 3], [Segment(0, 0, 3)], None) is None
    after = model.forward(cache, [4], [Segment(0, 3, 1)], [0])
    whole = model.forward(model.new_cache(1, 16), [1, 2, 3, 4], [Segment(0, 0, 4)], [3])
    assert torch.equal(after, whole)


@torch.inference_mode()
def test_more_rows_than_tokens(models):
    """A companion with another tokenizer asks for the same row for several drafted tokens."""
    model = load(models, RECIPES[0], torch.float32)
    rows = [0, 1, 1, 1, 0] * 200
    repeated = model.forward(model.new_cache(1, 8), [1, 2], [Segment(0, 0, 2)], rows)
    single = model.forward(model.new_cache(1, 8), [1, 2], [Segment(0, 0, 2)], [0, 1])
    assert torch.equal(repeated, single[rows])


def test_prompts_of_any_length(models):
    """Some prompts are too long for one block of rows in the processor's cache."""
    for dtype in DTYPES:
        recipe = replace(TILED, context=700)
        ours, theirs = (load(models, recipe, dtype, native) for native in (True, False))
        text = torch.randint(0, 71, (600,), generator=torch.Generator().manual_seed(0)).tolist()
        for length in (1, 15, 16, 17, 31, 33, 65, 192, 193, 330, 600):
            wanted = sorted({0, length // 2, length - 1})
            got, expected = (
                model.forward(
                    model.new_cache(1, 700), text[:length], [Segment(0, 0, length)], wanted
                )
                for model in (ours, theirs)
            )
            assert rms_error(got, expected) < TOLERANCE[dtype], length


def test_positions_outside_the_cache_are_refused(models):
    model = load(models, RECIPES[0], torch.float32)
    for tokens, segment, error in [
        ([32], Segment(0, 0, 1), IndexError),
        ([-1], Segment(0, 0, 1), IndexError),
        ([1, 2], Segment(0, 0, 1), ValueError),
        ([1, 2], Segment(0, 15, 2), ValueError),
        ([1], Segment(0, -1, 1), ValueError),
        ([1], Segment(1, 0, 1), ValueError),
        ([1], Segment(-1, 0, 1), ValueError),
    ]:
        error_of(model.native, model.new_cache(1, 16), tokens, [segment], [0], error=error)
