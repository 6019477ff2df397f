"""Quantisation rounds the weights of linear layers and changes nothing else."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftwise.checkpoints.quantization import (
    expand_weights,
    has_quantized_weights,
    quantize_linear_layers,
)
from draftwise.models import loading
from draftwise.models.forward import ModuleForward
from draftwise.models.segment import Segment

from ..tiny_models import Recipe
from .loading_tools import load

# Layers with 64 inputs have groups of 32; those with 24 have none.
RECIPE = Recipe(vocab=32, seed=2, config={"hidden_size": 64, "intermediate_size": 24})
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@torch.inference_mode()
def logits_of(loaded):
    cache = loaded.model.new_cache(1, len(IDS))
    return loaded.model.forward(cache, IDS, [Segment(0, 0, len(IDS))], range(len(IDS)))


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_are_rounded(quantization, bits):
    """Each weight becomes the nearest level, and the levels cover the range of its group."""
    plain, model = RECIPE.build(), RECIPE.build()
    quantize_linear_layers(model, quantization)
    assert has_quantized_weights(model)
    expand_weights(model)
    assert not has_quantized_weights(model)
    for before, after in zip(plain.modules(), model.modules(), strict=True):
        if not isinstance(before, nn.Linear):
            continue
        outputs, inputs = before.weight.shape
        in_eight = bits == 8 or before is plain.get_output_embeddings()
        group = 32 if not in_eight and inputs % 32 == 0 else inputs
        old, new = (m.weight.detach().view(outputs, -1, group) for m in (before, after))
        if in_eight:
            step = 2 * old.abs().amax(dim=2, keepdim=True) / 255
        else:
            step = (old.amax(dim=2, keepdim=True) - old.amin(dim=2, keepdim=True)) / 15
            assert max(len(row.unique()) for row in new.flatten(0, 1)) <= 16
        error = (new - old).abs() / step
        # At most half a step, and half a step more at the ends because the zero point is rounded.
        assert error.max() < (0.51 if in_eight else 1.01)
        assert error.mean() == pytest.approx(0.25, abs=0.03)
        assert (new / step).frac().abs().sub(0.5).abs().min() > 0.49
    assert torch.equal(plain.get_input_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.covering("family", "quantization", "tied")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "opt"])
@torch.inference_mode()
def test_equals_transformers_on_the_rounded_weights(models, family, quantization, tied):
    recipe = Recipe(family, vocab=32, seed=2, config={"tie_word_embeddings": tied})
    loaded = load(f"{models.folder(recipe)}:{quantization}", "companion")
    assert loaded.name == f"{models.folder(recipe)}:{quantization}"
    plain = models.reference(recipe)
    assert loaded.num_parameters == sum(p.numel() for p in plain.parameters())
    model = AutoModelForCausalLM.from_pretrained(models.folder(recipe), dtype=torch.float32)
    quantize_linear_layers(model, quantization)
    expand_weights(model)
    actual = logits_of(loaded)
    expected = model(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    difference = (actual - plain(input_ids=torch.tensor([IDS])).logits[0]).abs().mean()
    assert 1e-4 < difference < (0.1 if quantization == "int8" else 1.0)


def test_fewer_bits_have_a_larger_error(models):
    folder = models.folder(RECIPE)
    plain, fine, coarse = (
        logits_of(load(folder + suffix, "companion")) for suffix in ("", ":int8", ":int4")
    )
    assert (fine - plain).abs().mean() < (coarse - plain).abs().mean() / 4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_stay_quantised(models, monkeypatch, quantization):
    """The model's own modules compute with torchao's tensors, as on a GPU."""
    folder = f"{models.folder(RECIPE)}:{quantization}"
    expanded = load(folder, "companion")
    monkeypatch.setattr(loading, "expand_weights", lambda model: None)
    kept = load(folder, "companion")
    assert isinstance(kept.model._forward, ModuleForward)
    assert has_quantized_weights(kept.model._model)
    torch.testing.assert_close(logits_of(kept), logits_of(expanded), rtol=1e-3, atol=1e-3)


def test_an_unknown_number_of_bits_is_refused():
    with pytest.raises(ValueError, match="int7"):
        quantize_linear_layers(RECIPE.build(), "int7")
