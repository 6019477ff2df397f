"""Hidden states at chosen layers are those of Hugging Face's own modules, on every path."""

import pytest
import torch

from draftwise.kernels.native.library import native_library
from draftwise.models import pretrained
from draftwise.models.decoder import DecoderForward
from draftwise.models.hidden_states import StateTap
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment
from draftwise.models.static_steps import StepMode

from ..tiny_models import FAMILIES, Recipe
from .passes import rms_error

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1], [8, 2, 8, 1, 8]]
SEGMENTS = [Segment(0, 0, 9), Segment(1, 0, 3), Segment(3, 0, 5)]
TOKENS = [token for text in TEXTS for token in text]


@torch.inference_mode()
def expected_states(models, recipe, layers):
    """``[tokens, states * hidden]`` of all texts."""
    model = models.reference(recipe)
    states = [states_of_text(model, text) for text in TEXTS]
    return torch.cat([torch.cat([each[layer] for layer in layers], dim=1) for each in states])


def states_of_text(model, text):
    """The input of each layer, and the output of the last one."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
        for layer in layers_of(model)
    ]
    hooks.append(
        layers_of(model)[-1].register_forward_hook(
            lambda _, __, output: seen.append(
                (output[0] if isinstance(output, tuple) else output)[0]
            )
        )
    )
    own = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    # Except for the last state, transformers numbers them in the same way.
    for ours, theirs in zip(seen[:-1], own, strict=False):
        torch.testing.assert_close(ours, theirs[0])
    return seen


def layers_of(model):
    base = model.base_model
    return next(
        getattr(part, name)
        for part in (base, getattr(base, "decoder", base))
        for name in ("layers", "h")
        if hasattr(part, name)
    )


def states_of(model, layers, logit_rows=(0, 16)):
    """States of a pass, and its logits, which must not change."""
    tap = StateTap(layers)
    logits = model.forward(model.new_cache(4, 64), TOKENS, SEGMENTS, logit_rows, tap)
    without = model.forward(model.new_cache(4, 64), TOKENS, SEGMENTS, logit_rows)
    assert logits is without or torch.equal(logits, without)
    return tap.rows


def load(models, recipe, native=True, dtype=torch.float32):
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(pretrained, "native_pass", lambda _: None)
        return load_model(models.folder(recipe), "target", dtype, torch.device("cpu")).model


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_every_family(models, family):
    recipe = Recipe(family, 16)
    model = load(models, recipe)
    count = len(model.layers)
    for layers in ((0, 1, count), (1,)):
        expected = expected_states(models, recipe, layers)
        # Recurrences add up what rounding differs by.
        close = {"atol": max(1e-4, 1.5e-4 * float(expected.std())), "rtol": 1e-4}
        torch.testing.assert_close(states_of(model, layers), expected, **close)
        # A pass without logits returns them too.
        torch.testing.assert_close(states_of(model, layers, None), expected, **close)


@torch.inference_mode()
@pytest.mark.covering("family", "mode")
@pytest.mark.parametrize("mode", [StepMode.EAGER, StepMode.STATIC])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2"])
def test_states_of_written_out_passes(models, family, mode):
    recipe = Recipe(family, 16)
    model = load(models, recipe, native=False)
    assert isinstance(model._forward, DecoderForward)
    model.step_mode = mode
    for layers in ((0, 1, len(model.layers)), (1,)):
        expected = expected_states(models, recipe, layers)
        for _ in range(2):  # static steps use their memory again
            torch.testing.assert_close(states_of(model, layers), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_static_steps_keep_what_they_returned(models):
    model = load(models, Recipe("llama", 16), native=False)
    model.step_mode = StepMode.STATIC
    cache, taps = model.new_cache(4, 64), [StateTap((1,)), StateTap((1,))]
    for tap, token in zip(taps, (3, 5), strict=True):
        model.forward(cache, [token], [Segment(0, cache.lengths[0], 1)], [0], tap)
    assert not torch.equal(taps[0].rows, taps[1].rows)


@pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")
@torch.inference_mode()
def test_states_in_bfloat16(models):
    """The kernels round the residual stream to the model's dtype."""
    recipe = Recipe("llama", 16)
    model = load(models, recipe, dtype=torch.bfloat16)
    states = states_of(model, (0, 1, 2))
    assert states.dtype == torch.bfloat16
    expected = expected_states(models, recipe, (0, 1, 2))
    assert rms_error(states, expected) < 0.03
