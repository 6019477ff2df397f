"""Passes of heads that draft blocks with native kernels, compared with PyTorch's operations."""

import pytest
import torch

from draftwise.kernels.native import suitability
from draftwise.kernels.native.block_head import NativeBlockHead
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.narrow import COMPRESSED_BITS
from draftwise.models.heads import block_model
from draftwise.models.heads.loading import load_head
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..tiny_blocks import BlockRecipe
from ..tiny_models import Recipe
from .passes import assert_same_with_any_threads, rms_error, treat_as_large

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
VOCAB = 33
HEAD = BlockRecipe(vocab=VOCAB, layers=(-1, 0))
OWN = HEAD.changed(own_projection=True, own_embedding=True)
HEADS = {
    "all tokens": ("z-lab", HEAD),
    "own projection": ("z-lab", OWN),
    "part of the vocabulary": ("speculators", OWN.changed(draft_vocab=20, discards_anchor=False)),
    "causal windows": ("z-lab", OWN.changed(windows=(6, 40))),
    "causal windows before the block": ("speculators", OWN.changed(windows=(6, 40))),
    "windows": ("z-lab", OWN.changed(windows=(40, None), causal=False)),
    "windows to both sides": ("z-lab", OWN.changed(windows=(3, 3), causal=False)),
    "windows before the block": ("speculators", OWN.changed(windows=(6, 40), causal=False)),
}


def load(models, tmp_path, name, dtype, native=True, hidden=16):
    layout, recipe = HEADS[name]
    recipe = recipe.changed(hidden=hidden)
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 6}
    target = Recipe(vocab=VOCAB, config={"hidden_size": hidden, "num_hidden_layers": 2, **sizes})
    loaded = load_model(models.folder(target), "target", dtype, CPU)
    recipe.save(tmp_path, layout)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(block_model, "native_head", lambda *_: None)
        head = load_head("head", tmp_path, loaded, dtype).model
    assert isinstance(head.native, NativeBlockHead) is native
    return head


def drafted(head):
    """Logits and outputs of blocks of two requests whose contexts grow in pieces of many sizes."""
    generator = torch.Generator().manual_seed(0)
    cache, results = head.new_cache(3, 256, 64), []
    for counts in ((7, 1), (0, 2), (33, 64), (2, 0), (62, 1), (1, 64), (3, 2)):
        starts = [cache.lengths[slot] for slot in (0, 2)]
        context = [
            Segment(slot, start, count)
            for slot, start, count in zip((0, 2), starts, counts, strict=True)
            if count
        ]
        states = torch.randn(sum(counts), head.state_size, generator=generator).to(head.dtype)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        blocks = [
            Segment(slot, end, head.block_size) for slot, end in zip((0, 2), ends, strict=True)
        ]
        anchors = torch.randint(0, VOCAB, (2,), generator=generator).tolist()
        if counts == (1, 64):  # only one of them drafts
            blocks, anchors = blocks[:1], anchors[:1]
        output = head.read(cache, states, context, anchors, blocks, 3)
        assert [cache.lengths[slot] for slot in (0, 2)] == ends
        assert output.hidden.shape == (len(blocks), 3, head.hidden_size)
        results += [output.logits.float().flatten(), output.hidden.float().flatten()]
    assert head.read(cache, states[:3], [Segment(0, ends[0], 3)]) is None
    return torch.cat(results)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_kernels_and_operations_agree(models, tmp_path, name, dtype):
    results = [drafted(load(models, tmp_path, name, dtype, native)) for native in (True, False)]
    assert rms_error(*results) < TOLERANCE[dtype]


@torch.inference_mode()
@pytest.mark.skipif(
    native_library() is None or not native_library().multiplies_pairs,
    reason="needs instructions for bfloat16",
)
def test_compressed_weights_give_the_same_results(models, tmp_path, monkeypatch):
    """As heads that are larger than the processor's caches have them."""
    arguments = models, tmp_path, "part of the vocabulary", torch.bfloat16
    results = [drafted(load(*arguments, hidden=64))]
    treat_as_large(monkeypatch)
    monkeypatch.setattr(suitability, "_TILE_DEPTH", 8)
    head = load(*arguments, hidden=64)
    assert head.native.bits == COMPRESSED_BITS
    results.append(drafted(head))
    assert torch.equal(*results)


@torch.inference_mode()
def test_results_do_not_depend_on_the_number_of_threads(models, tmp_path):
    head = load(models, tmp_path, "windows", torch.float32)
    assert_same_with_any_threads(lambda: drafted(head))
