"""A model computed in parts gives what a pass over all layers gives, on every path."""

import pytest
import torch

from draftwise.kernels.native.library import native_library
from draftwise.models.decoder import DecoderForward
from draftwise.models.model_part import ModelPart

from ..engine.exits import exit_logits
from ..tiny_models import FAMILIES, RECURRENT, Recipe
from .test_hidden_states import SEGMENTS, TEXTS, TOKENS, load

ROWS = range(len(TOKENS))
LAYERS = {"num_hidden_layers": 3}
# Their layers are listed one by one.
OWN_LAYERS = ("gemma3_text", "gemma4_text")


def in_parts(model, exits, logit_rows=ROWS):
    """Logits after each part."""
    cache, stream, logits = model.new_cache(4, 64), None, []
    for first, end in zip([0, *exits], [*exits, len(model.layers)], strict=True):
        part = ModelPart(model, first, end)
        output = part.forward(cache, TOKENS, SEGMENTS, list(logit_rows), stream, leaves=True)
        stream = output.stream
        logits.append(output.logits.clone())
    # All layers are computed before the lengths change.
    assert cache.lengths == [0, 0, 0, 0]
    cache.advance_all(SEGMENTS)
    assert cache.lengths == [9, 3, 0, 5]
    return logits


@torch.inference_mode()
@pytest.mark.covering("family", "native")
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "operations"])
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in RECURRENT])
def test_parts_of_every_family(models, family, native):
    recipe = Recipe(family, 16, config={} if family in OWN_LAYERS else LAYERS)
    model = load(models, recipe, native)
    whole = model.forward(model.new_cache(4, 64), TOKENS, SEGMENTS, ROWS).clone()
    first, second, last = in_parts(model, (1, 2))
    # The same operations on the same numbers.
    assert torch.equal(last, whole)
    reference = models.reference(recipe)
    for logits, num_layers in ((first, 1), (second, 2)):
        expected = torch.cat([exit_logits(reference, num_layers, text) for text in TEXTS])
        torch.testing.assert_close(logits.float(), expected, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "operations"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_parts_in_bfloat16(models, family, native):
    """The residual stream enters a part in the precision in which the one before left it."""
    model = load(models, Recipe(family, 16, config=LAYERS), native, torch.bfloat16)
    assert native_library() is None or native == (model.native is not None)
    assert native or isinstance(model._forward, DecoderForward)
    whole = model.forward(model.new_cache(4, 64), TOKENS, SEGMENTS, ROWS).clone()
    assert torch.equal(in_parts(model, (1,))[-1], whole)


@torch.inference_mode()
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "operations"])
def test_some_logits_and_none(models, native):
    model = load(models, Recipe("llama", 16, config=LAYERS), native)
    every, some = in_parts(model, (2,)), in_parts(model, (2,), (0, 16))
    for all_rows, two_rows in zip(every, some, strict=True):
        torch.testing.assert_close(two_rows, all_rows[[0, 16]])
    cache = model.new_cache(4, 64)
    lower, upper = ModelPart(model, 0, 2), ModelPart(model, 2, 3)
    left = lower.forward(cache, TOKENS, SEGMENTS, None, leaves=True)
    assert left.logits is None
    logits = upper.forward(cache, TOKENS, SEGMENTS, [16], left.stream).logits
    torch.testing.assert_close(logits, every[-1][[16]])
