"""Weights that are stored in fewer bits than the kernels use for computation."""

import numpy as np
import pytest
import torch

from draftwise.kernels.native import narrow, structures, suitability
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.packed import PACKED
from draftwise.kernels.native.panels import panels
from draftwise.models import pretrained
from draftwise.models.loading import load_model

from ..tiny_models import Recipe
from .passes import logits_of, rms_error, treat_as_large
from .test_native_decoder import RECIPES, TILED, load

pytestmark = pytest.mark.skipif(
    native_library() is None or not native_library().multiplies_pairs,
    reason="this machine has no kernels for narrow weights",
)

CPU = torch.device("cpu")
# A multiple of the tile size, large enough that each thread computes several pieces.
LARGE = Recipe(
    "llama", 2048, config={"hidden_size": 128, "head_dim": 64, "intermediate_size": 1344}
)


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    treat_as_large(monkeypatch)


def some_tokens(vocab, count):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


WITH_PAIRS = pytest.mark.skipif(
    native_library() is None or not native_library().multiplies_pairs,
    reason="12-bit weights need AVX512-BF16",
)


class TestTwelveBits:
    """bfloat16 weights, compressed without loss."""

    def load(self, folder, bits, monkeypatch):
        def stored(spec, layers, library, dtype, reads_memory):
            return bits if dtype == torch.bfloat16 else 8 * dtype.itemsize

        monkeypatch.setattr(suitability, "_stored_bits", stored)
        model = load_model(str(folder), "target", torch.bfloat16, CPU).model
        assert model.native.bits == bits
        return model

    @WITH_PAIRS
    @pytest.mark.parametrize("recipe", [TILED, LARGE], ids=lambda r: str(r.vocab))
    def test_results_are_the_same_bit_by_bit(self, models, monkeypatch, recipe):
        narrow_model, wide_model = (
            self.load(models.folder(recipe), bits, monkeypatch) for bits in (12, 16)
        )
        for num_tokens in (1, 5, 12, 13, 16, 17, 48, 49, 64, 100, 150, 200, 450):
            tokens = some_tokens(recipe.vocab, num_tokens)
            ours, expected = (logits_of(model, tokens) for model in (narrow_model, wide_model))
            assert torch.equal(ours, expected), num_tokens

    @WITH_PAIRS
    def test_rare_exponents_are_stored_exactly(self, tmp_path, monkeypatch):
        model = TILED.build()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                flat = parameter.data.flatten()
                flat[::97] *= 2.0 ** torch.randint(-90, 1, flat[::97].shape)
                flat[:3], flat[-3:] = 1e-40, -1e-20
                parameter.data = flat.view_as(parameter)
        model.save_pretrained(tmp_path)
        narrow_model, wide_model = (self.load(tmp_path, bits, monkeypatch) for bits in (12, 16))
        for num_tokens in (1, 7, 12, 40, 120):
            tokens = some_tokens(TILED.vocab, num_tokens)
            ours, expected = (logits_of(model, tokens) for model in (narrow_model, wide_model))
            assert torch.equal(ours, expected), num_tokens

    def test_every_bfloat16_value_survives_the_format(self):
        """The kernels write the format, and Python code reads it."""
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
        common = torch.randn(2**17, generator=torch.Generator().manual_seed(0)).bfloat16()
        weight = torch.cat([common, numbers]).view(-1, 64)
        laid_out = panels(weight, native_library())
        assert torch.equal(
            read(narrow.compressed_weight(laid_out, native_library())), bits(laid_out)
        )

    def test_which_weights_are_compressible(self):
        library = native_library()
        usual = torch.randn(64, 64).bfloat16()
        odd = (torch.rand(64, 64) * 2.0 ** torch.randint(-60, 1, (64, 64))).bfloat16()
        assert narrow.are_compressible([usual, 1000 * usual, torch.zeros_like(usual)], library)
        assert not narrow.are_compressible([usual, odd], library)

    @WITH_PAIRS
    def test_large_models_are_compressed(self, models, monkeypatch):
        def bits():
            return load(models, TILED, torch.bfloat16).native.bits

        assert bits() == 12
        monkeypatch.setattr(suitability, "_SMALL_MODEL", 2**20)
        assert bits() == 16


def header_of(stored):
    return stored[: structures.NARROW_HEADER.itemsize].numpy().view(structures.NARROW_HEADER)[0]


def bits(numbers):
    return numbers.flatten().view(torch.int16)


def read(stored):
    """The bits ``[values]`` of what ``compressed_weight`` stored."""
    header, whole = header_of(stored), stored.numpy()
    groups = whole[header["panels"] :]
    groups = groups[: len(groups) // 192 * 192].reshape(-1, 192)
    words = np.ascontiguousarray(groups[:, :64]).view(np.uint16)
    codes = np.concatenate([words >> shift & 15 for shift in (0, 4, 8, 12)], axis=1)
    rest = groups[:, 64:].astype(np.uint16)
    numbers = (rest & 0x80) << 8 | rest & 0x7F | header["exponents"][codes]
    numbers = numbers.flatten()
    end = header["exceptions"] + 8 * header["num_exceptions"]
    for exception in whole[header["exceptions"] : end].view(np.uint64).tolist():
        numbers[exception >> 16] = exception & 0xFFFF
    return torch.from_numpy(numbers.view(np.int16))


class TestEightBits:
    """8-bit weights that the kernels compute with directly."""

    SIZES = (TILED, RECIPES[1], RECIPES[3])

    def load(self, models, recipe, native=True):
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(pretrained, "native_pass", lambda _: None)
            model = load_model(models.folder(recipe) + ":int8", "target", torch.bfloat16, CPU).model
        assert (model.native is not None) is native
        return model

    @pytest.mark.parametrize("recipe", SIZES, ids=lambda recipe: f"{recipe.vocab}")
    def test_logits_equal_those_of_pytorch(self, models, recipe):
        ours, theirs = (self.load(models, recipe, native) for native in (True, False))
        assert ours.native.bits in (8, PACKED)
        generator = torch.Generator().manual_seed(2)
        for count in (1, 7, 18, 40):
            tokens = torch.randint(0, recipe.vocab, (count,), generator=generator).tolist()
            got, expected, plain = (
                logits_of(model, tokens)
                for model in (ours, theirs, load(models, recipe, torch.bfloat16))
            )
            assert rms_error(got, expected) < 0.05
            assert rms_error(plain, expected) > 1e-3

    @pytest.mark.parametrize("recipe", SIZES, ids=lambda recipe: f"{recipe.vocab}")
    def test_logits_do_not_depend_on_the_batch(self, models, recipe):
        model = self.load(models, recipe)
        text = some_tokens(recipe.vocab, 40)
        assert torch.equal(logits_of(model, text, [1] * 40), logits_of(model, text))
