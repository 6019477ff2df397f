"""Weights whose integers have a scale per group of inputs, and rows that are rounded to 8 bits."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn

from draftwise.checkpoints.gguf.grids import grid_of
from draftwise.checkpoints.gguf.header import BLOCK_TYPES
from draftwise.checkpoints.quantization import BlockRows, QuantizedMatrix, keep_stored, stored_rows
from draftwise.kernels.native.compilation import FLAGS_VARIABLE
from draftwise.kernels.native.instruction_sets import OPTIONS, SOURCES
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.narrow import QUANTIZED_BITS
from draftwise.kernels.native.packed import (
    PACKED,
    expand_blocks,
    is_packable,
    multiply_packed,
    packed_weight,
    why_not_packed,
)
from draftwise.models import pretrained
from draftwise.models.loading import load_model

from ..tiny_models import Recipe
from .passes import logits_of, rms_error, treat_as_large

pytestmark = pytest.mark.skipif(
    native_library() is None, reason="this machine has no native kernels"
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
    return QUANTIZED_BITS if has_scale_per_output and tiles else PACKED


BLOCKS = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
]
# Bytes of a block that are float16 numbers.
HALVES = {
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K"], (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"], (0,)),
}


def random_blocks(name, rows, inputs, seed=0):
    """Rows of random blocks, whose float16 numbers are finite."""
    numbers, size = gguf.GGML_QUANT_SIZES[Type[name]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, inputs // numbers, size), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        halves = random.normal(size=(rows, inputs // numbers, 1)).astype(np.float16) / 8
        data[:, :, at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        data[:, :, 0] = random.integers(110, 130, data.shape[:2])
    if name == "NVFP4":
        data[:, :, :4] &= 127
    if name == "IQ1_M":  # the factor has four bits of each of four words
        data[:, :, 55] &= 0x1F
    return BlockRows(name, int(Type[name]), data.reshape(rows, -1), inputs)


def exact(blocks):
    return torch.from_numpy(gguf.quants.dequantize(blocks.chosen, Type[blocks.type_name]))


def product_of_rounded(rows, weight):
    """The product of a weight and rows that are rounded to 8 bits, with a scale for 32 inputs."""
    groups = rows.view(len(rows), -1, 32)
    scale = groups.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(scale > 0, 127 / scale, 0.0)
    rounded = (groups * inverse).round() * (scale / 127)
    return rounded.double().flatten(1) @ weight.double().T


def test_the_library_has_the_sizes_of_ggml():
    for number, kind in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.numbers, kind.num_bytes)
        assert Type(number).name == kind.name


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_expanded_as_in_ggml(name):
    blocks = random_blocks(name, 5, 512)
    assert torch.equal(expand_blocks(blocks, native_library()), exact(blocks))
    in_order = BlockRows(name, blocks.type_number, blocks.data, 512, torch.tensor([3, 0, 4]))
    assert torch.equal(expand_blocks(in_order, native_library()), exact(blocks)[[3, 0, 4]])


def test_a_number_that_multiplies_all_rows():
    blocks = replace(random_blocks("NVFP4", 32, 256), unit=0.375)
    weight = 0.375 * exact(blocks)
    assert torch.equal(expand_blocks(blocks, native_library()), weight)
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    packed = packed_weight([[blocks]], native_library())
    expected = product_of_rounded(rows, weight)
    got = multiply_packed(rows, packed, 32, native_library())
    assert (got - expected).abs().max() / expected.std() < 1e-4
    assert not blocks.is_like(replace(blocks, unit=1.0))


@pytest.mark.parametrize("name", BLOCKS)
def test_products_are_those_of_rounded_rows(name):
    blocks = random_blocks(name, 75, 768)
    packed = packed_weight([[blocks]], native_library())
    rows = torch.randn(40, 768, generator=torch.Generator().manual_seed(1))
    rows[3] = 0
    expected = product_of_rounded(rows, exact(blocks))
    got = multiply_packed(rows, packed, 75, native_library())
    error = (got - expected).abs().max() / expected.std()
    assert error < 1e-4
    # The bits of a row depend neither on the other rows nor on their number.
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33):
        part = multiply_packed(rows[40 - count :], packed, 75, native_library())
        assert torch.equal(part, got[40 - count :]), count


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_pieces_of_rows_in_another_order(name, size):
    stored, library = random_blocks(name, 37, 768), native_library()
    pieces = torch.randperm(768 // size, generator=torch.Generator().manual_seed(size))
    inputs = (size * pieces.unsqueeze(1) + torch.arange(size)).flatten()
    blocks = replace(stored, pieces=pieces)
    assert torch.equal(expand_blocks(blocks, library), exact(stored)[:, inputs])
    rows = torch.randn(20, 768, generator=torch.Generator().manual_seed(5))
    expected = product_of_rounded(rows, exact(stored)[:, inputs])
    got = multiply_packed(rows, packed_weight([[blocks]], library), 37, library)
    assert (got - expected).abs().max() / expected.std() < 1e-4
    for count in (1, 4, 17):
        part = multiply_packed(rows[:count], packed_weight([[blocks]], library), 37, library)
        assert torch.equal(part, got[:count]), count


def test_pieces_that_groups_do_not_divide():
    blocks = replace(random_blocks("Q8_0", 32, 480), pieces=torch.arange(10))
    assert not is_packable(blocks)


def test_depths_that_blocks_of_256_do_not_divide():
    for inputs in (32, 64, 96, 896):
        blocks = random_blocks("Q5_0", 33, inputs)
        rows = torch.randn(9, inputs, generator=torch.Generator().manual_seed(2))
        got = multiply_packed(
            rows, packed_weight([[blocks]], native_library()), 33, native_library()
        )
        expected = product_of_rounded(rows, exact(blocks))
        assert (got - expected).abs().max() / expected.std() < 1e-4, inputs


def test_parts_of_several_types_follow_each_other():
    parts = [random_blocks(name, 64, 256) for name in ("Q4_K", "Q6_K", "Q8_0")]
    rows = torch.randn(2, 256, generator=torch.Generator().manual_seed(3))
    got = multiply_packed(rows, packed_weight([parts], native_library()), 192, native_library())
    expected = product_of_rounded(rows, torch.cat([exact(each) for each in parts]))
    assert (got - expected).abs().max() / expected.std() < 1e-4
    odd = [random_blocks(name, 40, 256) for name in ("Q4_K", "Q6_K")]
    assert "different types" in why_not_packed([odd])
    alike = [random_blocks("Q4_K", 40, 256, seed) for seed in (0, 1)]
    got = multiply_packed(rows, packed_weight([alike], native_library()), 80, native_library())
    expected = product_of_rounded(rows, torch.cat([exact(each) for each in alike]))
    assert (got - expected).abs().max() / expected.std() < 1e-4


def test_rows_that_are_not_finite_give_results_that_are_not():
    blocks = random_blocks("Q4_K", 32, 256)
    packed = packed_weight([[blocks]], native_library())
    for value in (float("nan"), float("inf"), float("-inf")):
        for count in (1, 20):
            rows = torch.ones(count, 256)
            rows[0, 100] = value
            got = multiply_packed(rows, packed, 32, native_library())
            assert not got[0].isfinite().any()
            assert got[1:].isfinite().all()


# Prints a digest of products, computed with the instruction set that the environment names.
DIGEST = """
import hashlib, torch
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.packed import multiply_packed, packed_weight
from tests.models.test_packed_weights import BLOCKS, random_blocks
library, digest = native_library(), hashlib.sha256()
for name in BLOCKS:
    packed = packed_weight([[random_blocks(name, 75, 768)]], library)
    rows = torch.randn(20, 768, generator=torch.Generator().manual_seed(1))
    digest.update(multiply_packed(rows, packed, 75, library).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86-64")
def test_all_instruction_sets_have_the_same_bits():
    root = Path(__file__).parents[2]
    found = set()
    for flags in ("", "-march=x86-64-v4", "-march=x86-64-v3"):
        if not flags or supports(flags):
            environment = {**os.environ, FLAGS_VARIABLE: flags, "PYTHONPATH": str(root)}
            command = [sys.executable, "-c", DIGEST]
            done = subprocess.run(
                command, env=environment, cwd=root, capture_output=True, text=True, check=True
            )
            found.add(done.stdout.strip())
    assert len(found) == 1


CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not shutil.which(CROSS_COMPILER) or not shutil.which(EMULATOR),
    reason=f"needs {CROSS_COMPILER} and {EMULATOR}",
)
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.2-a+dotprod", "armv8.2-a+dotprod+i8mm"])
def test_arm_has_the_same_bits(tmp_path, processor):
    program = tmp_path / "packed"
    options = [*OPTIONS, f"-march={processor}", "-static", f"-I{SOURCES}"]
    options = [each for each in options if each not in ("-fPIC", "-shared")]
    source = Path(__file__).with_name("packed_on_arm.cpp")
    subprocess.run([CROSS_COMPILER, *options, "-o", program, source], check=True)
    library, rows = native_library(), torch.randn(10, 768)
    given, expected = b"", []
    for name in BLOCKS:
        blocks = random_blocks(name, 75, 768)
        packed = packed_weight([[blocks]], library)
        grid = grid_of(name).tobytes() if name[:3] in ("IQ1", "IQ2", "IQ3") else b""
        row = blocks.data.shape[1]
        sizes = (blocks.type_number, 75, 768, row, len(packed), len(rows), len(grid))
        given += np.array(sizes, dtype=np.int64).tobytes() + blocks.data.tobytes()
        given += packed.numpy().tobytes() + rows.numpy().tobytes() + grid
        expected.append(multiply_packed(rows, packed, 75, library))
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", program], input=given, capture_output=True, check=True
    )
    size = 8 + 4 * expected[0].numel()
    assert len(done.stdout) == size * len(BLOCKS)
    for at, name in enumerate(BLOCKS):
        part = done.stdout[at * size : (at + 1) * size]
        assert int.from_bytes(part[:8], "little") == 1, name
        assert part[8:] == expected[at].numpy().tobytes(), name


def supports(flags):
    """Whether this processor has the instructions of a level of x86-64."""
    needed = {"-march=x86-64-v3": "avx2", "-march=x86-64-v4": "avx512vl"}[flags]
    return needed in Path("/proc/cpuinfo").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    treat_as_large(monkeypatch)


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
        keep_stored(layer, [matrix])


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
    assert rms_error(got, expected) < 0.03  # embedding, keys and values are rounded to bfloat16


def test_a_row_does_not_depend_on_the_others(models, monkeypatch):
    model = loaded(models, monkeypatch, FORMATS, torch.bfloat16)
    tokens = torch.randint(0, 203, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    assert torch.equal(logits_of(model, tokens, [1] * 30), logits_of(model, tokens))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_four_bits_of_torchao_are_kept(models, family):
    folder = models.folder(Recipe(family, 203, seed=3, config=SIZES))
    model = load_model(f"{folder}:int4", "target", torch.bfloat16, CPU).model
    assert model.native.bits == PACKED


@pytest.mark.parametrize("chosen", FORMATS[::3] + FORMATS[-1:], ids=lambda f: str(f)[:20])
def test_a_matrix_may_be_gate_and_up_in_one(models, monkeypatch, chosen):
    recipe = Recipe("phi3", 203, seed=3, config=SIZES)
    model = loaded(models, monkeypatch, [chosen], torch.bfloat16, recipe)
    assert model.native.bits == stored_bits([chosen])
    exact = loaded(models, monkeypatch, [chosen], torch.float32, recipe)
    tokens = list(range(20))
    got, expected = (logits_of(each, tokens) for each in (model, exact))
    assert rms_error(got, expected) < 0.03


def test_sizes_that_groups_do_not_divide(models):
    recipe = Recipe("llama", 64, config={**SIZES, "intermediate_size": 100})
    model = load_model(f"{models.folder(recipe)}:int4", "target", torch.bfloat16, CPU).model
    assert model.native.bits == 16
    layer = nn.Linear(100, 8, bias=False)
    keep_stored(layer, [random_matrix(torch.Generator(), 8, 100, (4, 50, False, False))])
    assert not is_packable(stored_rows(layer)[0])


def test_more_threads_than_cores_give_the_same_results():
    """Threads sleep at barriers, and the last one wakes them."""
    library = native_library()
    packed = packed_weight([[random_blocks("Q4_K", 640, 256)]], library)
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    expected = multiply_packed(rows, packed, 640, library)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4 * (os.cpu_count() or 1))
        for _ in range(200):
            assert torch.equal(multiply_packed(rows, packed, 640, library), expected)
    finally:
        torch.set_num_threads(threads)
