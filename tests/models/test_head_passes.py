"""Passes of heads with native kernels, compared with PyTorch's operations."""

import pytest
import torch

from draftwise.kernels.native.head import NativeHead
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.narrow import COMPRESSED_BITS
from draftwise.models.heads import model as head_model
from draftwise.models.heads.loading import load_head
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..tiny_eagle_heads import EagleRecipe
from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe
from .passes import assert_same_with_any_threads, rms_error, treat_as_large

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
DTYPES = list(TOLERANCE)
HEADS = {
    "plain": (45, HeadRecipe(vocab=33, draft_vocab=20)),
    "variants": (
        45,
        HeadRecipe(
            vocab=33,
            draft_vocab=33,
            qwen=True,
            num_layers=2,
            settings={"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        ),
    ),
    # All sizes are multiples of a tile of the matrix unit.
    "tiled": (64, HeadRecipe(vocab=40, draft_vocab=32, settings={"norm_before_fc": True})),
}


def load(models, tmp_path, name, dtype, native=True):
    hidden, recipe = HEADS[name]
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 6}
    target = Recipe(vocab=recipe.vocab, config={"hidden_size": hidden, **sizes})
    layer = {"head_dim": 32, "intermediate_size": 96} if hidden == 64 else {}
    recipe = recipe.changed(hidden=hidden, target_hidden=hidden, layer=layer)
    loaded = load_model(models.folder(target), "target", dtype, CPU)
    recipe.save(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(head_model, "native_head", lambda *_: None)
        head = load_head("head", tmp_path, loaded, dtype).model
    assert isinstance(head.native, NativeHead) is native
    return head


def chained(head):
    """Logits of texts of two requests in pieces, each followed by drafted tokens."""
    generator = torch.Generator().manual_seed(0)
    cache, logits = head.new_cache(3, 64), []
    for counts in ((7, 1), (2, 12), (1, 1)):
        starts = [cache.lengths[slot] for slot in (0, 2)]
        segments = [
            Segment(slot, start, count)
            for slot, start, count in zip((0, 2), starts, counts, strict=True)
        ]
        tokens = torch.randint(0, 33, (sum(counts),), generator=generator)
        states = torch.randn(sum(counts), head.state_size, generator=generator).to(head.dtype)
        rows = [counts[0] - 1, sum(counts) - 1]
        output = head.read(cache, tokens.tolist(), segments, rows, states)
        lengths = list(cache.lengths)
        for _ in range(3):
            logits.append(output.logits.float().clone())
            drafted = torch.randint(0, 33, (2,), generator=generator)
            places = [Segment(slot, cache.lengths[slot], 1) for slot in (0, 2)]
            output = head.read(cache, drafted, places, [0, 1], carried=output.carried)
        for slot in (0, 2):
            cache.truncate(slot, lengths[slot])
    return torch.cat(logits)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_kernels_and_operations_agree(models, tmp_path, name, dtype):
    results = [chained(load(models, tmp_path, name, dtype, native)) for native in (True, False)]
    assert rms_error(*results) < TOLERANCE[dtype]


@torch.inference_mode()
def test_bfloat16_gives_nearly_the_same_results_with_heads_of_eagle_1(models, tmp_path):
    EagleRecipe(vocab=33, bias=True).save(tmp_path)
    results = []
    for dtype in DTYPES:
        target = load_model(models.folder(Recipe(vocab=33)), "target", dtype, CPU)
        head = load_head("head", tmp_path, target, dtype).model
        assert head.native is None
        assert head.dtype == dtype
        results.append(chained(head))
    assert rms_error(*reversed(results)) < TOLERANCE[torch.bfloat16]


@torch.inference_mode()
@pytest.mark.skipif(
    native_library() is None or not native_library().multiplies_pairs,
    reason="needs instructions for bfloat16",
)
def test_compressed_weights_give_the_same_results(models, tmp_path, monkeypatch):
    """As heads that are larger than the processor's caches have them."""
    results = [chained(load(models, tmp_path, "tiled", torch.bfloat16))]
    treat_as_large(monkeypatch)
    head = load(models, tmp_path, "tiled", torch.bfloat16)
    assert head.native.bits == COMPRESSED_BITS
    results.append(chained(head))
    assert torch.equal(*results)


@torch.inference_mode()
@pytest.mark.parametrize("name", HEADS)
def test_keys_and_values_without_logits_are_the_same(models, tmp_path, name):
    """Where no logits are wanted, the last layer computes nothing else."""
    head = load(models, tmp_path, name, torch.float32)
    assert_same_without_logits(head)


def assert_same_without_logits(head):
    numbers, results = torch.Generator().manual_seed(0), []
    states = torch.randn(9, head.state_size, generator=numbers).to(head.dtype)
    tokens = torch.randint(0, 33, (9,), generator=numbers).tolist()
    for rows in ([], [2, 7]):
        cache = head.new_cache(3, 64)
        head.read(cache, tokens[:8], [Segment(0, 0, 3), Segment(2, 0, 5)], rows, states[:8])
        output = head.read(cache, tokens[8:], [Segment(2, 5, 1)], [0], states[8:])
        keys, values = cache.token_slots(len(head.layers) - 1)
        results.append((output.logits.clone(), keys[:3].clone(), values[128:134].clone()))
    for without, with_logits in zip(*results, strict=True):
        assert torch.equal(without, with_logits)


@torch.inference_mode()
def test_results_do_not_depend_on_the_number_of_threads(models, tmp_path):
    head = load(models, tmp_path, "plain", torch.float32)
    assert_same_with_any_threads(lambda: chained(head))
