"""Weights whose integers have a scale per group of inputs."""

import pytest
import torch
from torch import nn

from draftwise.checkpoints.quantization import QuantizedMatrix, keep_quantized, quantized_matrix
from draftwise.kernels.native import suitability
from draftwise.kernels.native.grouped import IN_GROUPS, is_groupable
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.narrow import QUANTIZED_BITS
from draftwise.models import pretrained
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..tiny_models import Recipe

pytestmark = pytest.mark.skipif(
    native_library() is None or not native_library().multiplies_pairs,
    reason="this machine has no kernels for weights in groups",
)

CPU = torch.device("cpu")
SIZES = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 224}
RECIPE = Recipe("llama", 203, seed=3, config=SIZES)
# Bits, inputs of a group, whether there are minimums, and whether scales are exact in float16.
FORMATS = [
    (4, 32, False, True),
    (4, 32, True, False),
    (5, 32, False, True),
    (5, 32, True, True),
    (6, 16, False, False),
    (8, 32, False, True),
    (8, 16, True, False),
    (8, None, False, False),  # one scale per output
]


def stored_bits(formats):
    """A matrix unit multiplies integers of 8 bits with one scale per output without groups."""
    has_scale_per_output = all(group is None for _, group, _, _ in formats)
    tiles = native_library().multiplies_tiles
    return QUANTIZED_BITS if has_scale_per_output and tiles else IN_GROUPS


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(suitability, "_SMALL_MODEL", 0)
    monkeypatch.setattr(suitability, "_why_slower", lambda *_: None)


def random_matrix(generator, outputs, inputs, chosen):
    bits, group, has_minimums, is_half = chosen
    smallest = 0 if has_minimums and bits < 8 else -(2 ** (bits - 1))
    shape = outputs, inputs // (group or inputs)
    numbers = torch.randint(
        smallest, smallest + 2**bits, (outputs, inputs), generator=generator, dtype=torch.int8
    )
    scales = (0.5 + torch.rand(shape, generator=generator)) * 0.25 / 2**bits
    minimums = 0.1 * torch.rand(shape, generator=generator) if has_minimums else None
    if is_half:
        scales = scales.half().float()
        minimums = None if minimums is None else minimums.half().float()
    return QuantizedMatrix(numbers, scales, minimums, bits, smallest)


def quantise_randomly(model, formats):
    """Give each linear layer a random matrix; the formats are used in turn."""
    generator = torch.Generator().manual_seed(5)
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    for at, layer in enumerate(layers):
        chosen = formats[at % len(formats)]
        matrix = random_matrix(generator, layer.out_features, layer.in_features, chosen)
        layer.weight = nn.Parameter(matrix.dequantize().to(layer.weight.dtype))
        keep_quantized(layer, matrix)


@torch.inference_mode()
def logits_of(model, tokens):
    cache = model.new_cache(1, len(tokens))
    return model.forward(cache, tokens, [Segment(0, 0, len(tokens))], range(len(tokens)))


def loaded(models, monkeypatch, formats, dtype, recipe=RECIPE):
    """The model with random matrices, computed with them or in float32 by its own modules."""

    class Quantised(pretrained.PretrainedModel):
        def __init__(self, model, *others):
            quantise_randomly(model, formats)
            super().__init__(model, *others)

    with monkeypatch.context() as patched:
        patched.setattr("draftwise.models.loading.PretrainedModel", Quantised)
        if dtype == torch.float32:
            patched.setattr(pretrained, "native_pass", lambda _: None)
        return load_model(str(models.folder(recipe)), "target", dtype, CPU).model


@pytest.mark.covering("formats", "num_tokens")
@pytest.mark.parametrize("num_tokens", [1, 9, 13, 40])
@pytest.mark.parametrize(
    "formats", [*([each] for each in FORMATS), FORMATS, FORMATS[::-1]], ids=lambda f: str(f)[:20]
)
def test_products_use_the_stored_integers(models, monkeypatch, formats, num_tokens):
    model = loaded(models, monkeypatch, formats, torch.bfloat16)
    assert model.native.bits == stored_bits(formats)
    exact = loaded(models, monkeypatch, formats, torch.float32)
    tokens = torch.randint(0, 203, (num_tokens,), generator=torch.Generator().manual_seed(1))
    got, expected = (logits_of(each, tokens.tolist()) for each in (model, exact))
    error = (got.float() - expected).square().mean().sqrt() / expected.std()
    assert error < 0.03  # embedding, keys and values are rounded to bfloat16


def test_a_row_does_not_depend_on_the_others(models, monkeypatch):
    model = loaded(models, monkeypatch, FORMATS, torch.bfloat16)
    tokens = torch.randint(0, 203, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    whole, cache = logits_of(model, tokens), model.new_cache(1, 30)
    for at, token in enumerate(tokens):
        row = model.forward(cache, [token], [Segment(0, at, 1)], [0])
        assert torch.equal(row[0], whole[at])


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_four_bits_of_torchao_are_kept(models, family):
    folder = models.folder(Recipe(family, 203, seed=3, config=SIZES))
    model = load_model(f"{folder}:int4", "target", torch.bfloat16, CPU).model
    assert model.native.bits == IN_GROUPS


@pytest.mark.parametrize("chosen", FORMATS[::3] + FORMATS[-1:], ids=lambda f: str(f)[:20])
def test_a_matrix_may_be_gate_and_up_in_one(models, monkeypatch, chosen):
    recipe = Recipe("phi3", 203, seed=3, config=SIZES)
    model = loaded(models, monkeypatch, [chosen], torch.bfloat16, recipe)
    assert model.native.bits == stored_bits([chosen])
    exact = loaded(models, monkeypatch, [chosen], torch.float32, recipe)
    tokens = list(range(20))
    got, expected = (logits_of(each, tokens) for each in (model, exact))
    error = (got.float() - expected).square().mean().sqrt() / expected.std()
    assert error < 0.03


def test_sizes_that_groups_do_not_divide(models):
    recipe = Recipe("llama", 64, config={**SIZES, "intermediate_size": 100})
    model = load_model(f"{models.folder(recipe)}:int4", "target", torch.bfloat16, CPU).model
    assert model.native.bits == 16
    layer = nn.Linear(100, 8, bias=False)
    keep_quantized(layer, random_matrix(torch.Generator(), 8, 100, (4, 50, False, False)))
    assert not is_groupable(quantized_matrix(layer))
