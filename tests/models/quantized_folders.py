"""Folders with quantised weights in the formats of published checkpoints, written tensor by tensor.

Each :class:`Format` quantises a tiny model. It knows the weights that the tensors stand for, by its
own formula, and writes a second folder with these weights unquantised. No package that quantises is
used. :data:`FORMATS` are the formats that are loaded, and those that are refused.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..tiny_models import Recipe, save

LLAMA = Recipe(vocab=32, config={"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
EXPERTS = Recipe(
    "qwen3_moe", vocab=32, config={"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
)
GPT_OSS = Recipe("gpt_oss", vocab=32, config={"hidden_size": 64, "intermediate_size": 64})

Tensors = dict[str, Tensor]
# Quantises a weight [outputs, inputs]: the ends of the names of the tensors that are stored, and
# the weight that they stand for.
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]


@dataclass(frozen=True)
class Format:
    """A format of quantised weights.

    Attributes:
        name: the format's name.
        settings: the ``quantization_config``.
        quantize: quantises a weight.
        recipe: the model.
        refusal: words of the error; ``None`` if the format is loaded.
        inputs: whether the layers quantise their inputs as well.
        file: the file in which the settings are; ``None`` for the configuration.
        which: parts of the names of the weights that are quantised.
        extra: further tensors of each quantised weight, by the ends of their names.
    """

    name: str
    settings: dict[str, Any]
    quantize: Quantize
    recipe: Recipe = LLAMA
    refusal: str | None = None
    inputs: bool = False
    file: str | None = None
    which: tuple[str, ...] = ("_proj.weight",)
    extra: Tensors = field(default_factory=dict)

    def write(self, root: Path) -> tuple[Path, Path]:
        """Write the model. Returns its folder and that of the unquantised model it stands for."""
        dense, folder = root / "dense", root / "quantized"
        save(self.recipe.build(), dense)
        self.quantize_folder(dense, folder)
        return folder, dense

    def quantize_folder(self, dense: Path, folder: Path) -> None:
        """Write a model quantised to another folder, and the weights it stands for to its own."""
        shutil.copytree(dense, folder)
        tensors = load_file(dense / "model.safetensors")
        stored = dict(tensors)
        for name in list(tensors):
            if not name.endswith(self.which):
                continue
            parts, weight = self.quantize(tensors[name])
            assert weight.shape == tensors[name].shape
            tensors[name] = weight
            del stored[name]
            stem = name.removesuffix(".weight")
            parts |= self.extra
            stored |= {stem + end: tensor.clone() for end, tensor in parts.items()}
        save_tensors(dense, tensors)
        save_tensors(folder, stored)
        if self.file is None:
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = self.settings
            (folder / "config.json").write_text(json.dumps(config))
        else:
            (folder / self.file).write_text(json.dumps(self.settings))


def save_tensors(folder: Path, tensors: Tensors) -> None:
    """Overwrite a folder's weights."""
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Integers ``[..., n]`` as a stream of bits in int32 ``[..., ceil(n · bits / 32)]``."""
    digits = (numbers.numpy()[..., None].astype(np.int64) >> np.arange(bits)) & 1
    stream = digits.reshape(*numbers.shape[:-1], -1).astype(np.uint8)
    missing = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, missing)])
    return torch.from_numpy(np.packbits(stream, axis=-1, bitorder="little").view(np.int32).copy())


def in_groups(weight: Tensor, bits: int, group: int, symmetric: bool = False):
    """Integers from 0 ``[outputs, inputs]``, scales and zero points ``[outputs, groups]``."""
    largest = 2**bits - 1
    blocks = weight.unflatten(1, (-1, group))
    if symmetric:
        scales = blocks.abs().amax(2) / (largest // 2)
        zeros = torch.full_like(scales, largest // 2 + 1)
    else:
        low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
        scales = (high - low) / largest
        zeros = (-low / scales).round()
    scales = scales.half()
    numbers = blocks / scales.float().unsqueeze(2) + zeros.unsqueeze(2)
    return numbers.round().clamp(0, largest).int().flatten(1), scales, zeros.int()


def stands_for(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight of integers in groups."""
    each = numbers.shape[1] // scales.shape[1]
    spread = zeros.repeat_interleave(each, 1)
    return (numbers - spread) * scales.float().repeat_interleave(each, 1)


def gptq(bits=4, group=32, first_version=True, shuffled=False, g_idx=True, symmetric=True):
    def quantize(weight):
        order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
        each = group or weight.shape[1]
        numbers, scales, zeros = in_groups(weight[:, order], bits, each, symmetric)
        dense = torch.empty_like(weight)
        dense[:, order] = stands_for(numbers, scales, zeros)
        codes, groups = torch.empty_like(numbers), torch.empty(len(order), dtype=torch.int32)
        codes[:, order] = numbers
        groups[order] = torch.arange(len(order), dtype=torch.int32) // each
        packed = pack(zeros.T, bits)
        if first_version and 32 % bits == 0:  # 1 is subtracted from all numbers of a word at once
            packed -= sum(1 << at for at in range(0, 32, bits))
        elif first_version:
            packed = pack((zeros.T - 1) % 2**bits, bits)
        parts = {".qweight": pack(codes, bits).T, ".qzeros": packed, ".scales": scales.T}
        return parts | ({".g_idx": groups} if g_idx else {}), dense

    return quantize


def awq(weight):
    numbers, scales, zeros = in_groups(weight, 4, 32)
    # AWQ stores the outputs of eight in the order 0, 2, 4, 6, 1, 3, 5, 7.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, points = (
        pack(each.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for each in (numbers, zeros)
    )
    parts = {".qweight": codes, ".qzeros": points, ".scales": scales.T}
    return parts, stands_for(numbers, scales, zeros)


def packed_integers(bits=4, group=32, symmetric=True):
    def quantize(weight):
        numbers, scales, zeros = in_groups(weight, bits, group or weight.shape[1], symmetric)
        parts = {
            ".weight_packed": pack(numbers, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = pack(zeros.T, bits).T
        return parts, stands_for(numbers, scales, zeros)

    return quantize


def int8_per_output(scale_type=torch.float32):
    def quantize(weight):
        scales = (weight.abs().amax(1, keepdim=True) / 127).to(scale_type)
        numbers = (weight / scales.float()).round().clamp(-128, 127)
        parts = {".weight": numbers.to(torch.int8), ".weight_scale": scales}
        return parts, numbers * scales.float()

    return quantize


def float8(rows=0, columns=0, scale=".weight_scale", scale_type=torch.float32, shape=None):
    """8-bit floats with a scale per block of rows and columns; 0 for all of them."""

    def quantize(weight):
        height, width = rows or weight.shape[0], columns or weight.shape[1]
        numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        dense = torch.empty_like(weight)
        scales = []
        for top in range(0, weight.shape[0], height):
            for left in range(0, weight.shape[1], width):
                block = (slice(top, top + height), slice(left, left + width))
                factor = weight[block].abs().max() / 448
                if scale_type == torch.uint8:
                    exponent = factor.log2().ceil()
                    factor = 2.0**exponent
                    scales.append(exponent + 127)
                else:
                    factor = factor.to(scale_type).float()
                    scales.append(factor)
                numbers[block] = (weight[block] / factor).to(torch.float8_e4m3fn)
                dense[block] = numbers[block].float() * factor
        grid = (-(-weight.shape[0] // height), -(-weight.shape[1] // width))
        stored = torch.tensor(scales).to(scale_type).view(grid)
        if shape is not None:
            stored = stored.view(shape(grid))
        return {".weight": numbers, scale: stored}, dense

    return quantize


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4_codes(numbers: Tensor) -> Tensor:
    """The codes of the nearest 4-bit floats."""
    return (numbers.unsqueeze(-1) - FP4).abs().argmin(-1)


def in_pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits in bytes, the first in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(weight):
    """4-bit floats with 8-bit scales of 16 inputs, as ModelOpt stores them."""
    blocks = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scales = (blocks.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    factors = (scales.float() * whole)[..., None]
    codes = fp4_codes(blocks / factors)
    parts = {".weight": in_pairs(codes.flatten(1)), ".weight_scale": scales}
    return parts | {".weight_scale_2": whole}, (FP4[codes] * factors).flatten(1)


def nvfp4_compressed(weight):
    """The same as compressed-tensors stores it: the scale of scales is a divisor."""
    blocks = weight.unflatten(1, (-1, 16))
    divisor = (6 * 448) / weight.abs().max()
    scales = (blocks.abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
    factors = (scales.float() / divisor)[..., None]
    codes = fp4_codes(blocks / factors)
    parts = {".weight_packed": in_pairs(codes.flatten(1)), ".weight_scale": scales}
    return parts | {".weight_global_scale": divisor.view(1)}, (FP4[codes] * factors).flatten(1)


def mxfp4_compressed(weight):
    """4-bit floats with an exponent for 32 inputs, as compressed-tensors stores them."""
    blocks = weight.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(2).log2().floor() - 2).to(torch.int32)
    factors = (2.0**exponents)[..., None]
    codes = fp4_codes(blocks / factors)
    parts = {".weight_packed": in_pairs(codes.flatten(1))}
    parts[".weight_scale"] = (exponents + 127).to(torch.uint8)
    return parts, (FP4[codes] * factors).flatten(1)


def mxfp4(weight):
    """gpt-oss' experts ``[experts, inputs, outputs]``."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (blocks.abs().amax(3).log2().floor() - 2).to(torch.int32)
    factors = (2.0**exponents)[..., None]
    codes = fp4_codes(blocks / factors)
    dense = (FP4[codes] * factors).flatten(2).transpose(1, 2)
    return {"_blocks": in_pairs(codes), "_scales": (exponents + 127).to(torch.uint8)}, dense


NF4_TABLE = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def nf4(nested=False):
    """bitsandbytes' 4-bit weights, computed in bfloat16, with scales that may be 8-bit codes."""

    def quantize(weight):
        blocks = weight.flatten().unflatten(0, (-1, 64))
        largest = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        parts = {}
        if nested:
            table = torch.linspace(-1, 1, 256)
            offset, factor = largest.mean(), (largest - largest.mean()).abs().max()
            codes = ((largest - offset) / factor - table[:, None]).abs().argmin(0)
            largest = table[codes] * factor + offset.item()
            parts = {
                ".weight.absmax": codes.to(torch.uint8),
                ".weight.nested_absmax": factor.view(1),
                ".weight.nested_quant_map": table,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
            state["nested_offset"] = offset.item()
        codes = (blocks / largest[:, None])[..., None].sub(NF4_TABLE).abs().argmin(-1).flatten()
        state = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts = {".weight.absmax": largest} | parts
        parts[".weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
        parts |= {".weight.quant_map": NF4_TABLE, ".weight.quant_state.bitsandbytes__nf4": state}
        values = NF4_TABLE[codes] * largest.repeat_interleave(64)
        return parts, values.bfloat16().float().view(weight.shape)

    return quantize


def torchao(bits=8):
    """torchao's integers with a zero point for 32 inputs."""

    def quantize(weight):
        numbers, scales, zeros = in_groups(weight, bits, 32)
        half = 2 ** (bits - 1)
        parts = {
            "._weight_qdata": (numbers - half).to(torch.int8),
            "._weight_scale": scales.float(),
        }
        parts["._weight_zero_point"] = (zeros - half).to(torch.int8)
        return parts, stands_for(numbers, scales, zeros)

    return quantize


def unchanged(weight):
    """For formats that are refused before a weight is read."""
    return {".weight": weight}, weight


def compressed(format, inputs=None, **weights):
    """The settings of compressed-tensors."""
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": known | {"group_size": 32, "dynamic": False}}
    group["weights"] |= weights
    group |= {"input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def torchao_settings(kind):
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_16, FP8_32, FP8_40 = (FP8 | {"weight_block_size": [size, size]} for size in (16, 32, 40))
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
W8A16 = compressed("pack-quantized", **CHANNEL)
TENSOR = {"num_bits": 8, "strategy": "tensor", "group_size": None, "type": "float"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {**TOKENS, "strategy": "tensor", "dynamic": False}
FLOATS = {"type": "float"}
NVFP4 = FLOATS | {"strategy": "tensor_group", "group_size": 16}
INPUT_SCALE = {".input_scale": torch.tensor([0.02])}
KV_SCALES = {".input_scale": torch.tensor(0.02), ".k_scale": torch.tensor(1.0)}
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
SCALE_INV = ".weight_scale_inv"


def scalar(grid):
    return ()


def one(grid):
    return (1,)


def outer(grid):
    return (grid[0], 1, grid[1], 1)


LOADED = (
    Format("gptq", GPTQ, gptq()),
    Format("gptq-asymmetric", GPTQ | {"sym": False}, gptq(symmetric=False)),
    Format("gptq-act-order", GPTQ | {"desc_act": True}, gptq(shuffled=True)),
    Format("gptq-one-group", GPTQ | {"group_size": -1}, gptq(group=0, g_idx=False)),
    Format("gptq-2-bit", GPTQ | {"bits": 2}, gptq(2)),
    Format("gptq-3-bit", GPTQ | {"bits": 3}, gptq(3, symmetric=False)),
    Format("gptq-8-bit", GPTQ | {"bits": 8}, gptq(8)),
    Format("gptq-v2", GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, first_version=False)),
    Format("gptq-experts", GPTQ, gptq(), EXPERTS),
    Format("awq", AWQ | {"version": "gemm"}, awq),
    Format("auto-round", AUTOROUND, gptq(g_idx=False)),
    Format(
        "auto-round-gptqmodel",
        AUTOROUND | {"packing_format": "auto_round:gptqmodel"},
        gptq(first_version=False, g_idx=False),
    ),
    Format("auto-round-awq", AUTOROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    Format("w4a16", compressed("pack-quantized"), packed_integers()),
    Format(
        "w4a16-asymmetric",
        compressed("pack-quantized", symmetric=False),
        packed_integers(symmetric=False),
    ),
    Format("w3a16", compressed("pack-quantized", num_bits=3), packed_integers(3)),
    Format("w8a16", W8A16, packed_integers(8, 0)),
    Format("w8a16-experts", W8A16, packed_integers(8, 0), EXPERTS),
    Format("w8a8", compressed("int-quantized", TOKENS, **CHANNEL), int8_per_output(), inputs=True),
    Format(
        "w8a8-static",
        compressed("int-quantized", STATIC, **CHANNEL),
        int8_per_output(),
        inputs=True,
        extra=INPUT_SCALE,
    ),
    Format("w4a8", compressed("pack-quantized", TOKENS), packed_integers(), inputs=True),
    Format("fp8-weights", compressed("float-quantized", **CHANNEL, **FLOATS), float8(1)),
    Format(
        "fp8-dynamic",
        compressed("float-quantized", TOKENS | FLOATS, **CHANNEL, **FLOATS),
        float8(1),
        inputs=True,
    ),
    Format(
        "fp8-static",
        compressed("float-quantized", STATIC | FLOATS, **TENSOR),
        float8(shape=one),
        inputs=True,
        extra=INPUT_SCALE,
    ),
    Format("nvfp4a16", compressed("nvfp4-pack-quantized", **NVFP4), nvfp4_compressed),
    Format("mxfp4a16", compressed("mxfp4-pack-quantized", **FLOATS), mxfp4_compressed),
    Format("fp8-blocks", FP8_32, float8(32, 32, SCALE_INV)),
    # Blocks that do not divide the weights.
    Format("fp8-ragged-blocks", FP8_40, float8(40, 40, SCALE_INV)),
    Format("fp8-experts", FP8_16, float8(16, 16, SCALE_INV), EXPERTS),
    Format(
        "fp8-tensor",
        FP8 | {"weight_block_size": None},
        float8(scale=SCALE_INV, shape=scalar),
        extra={".activation_scale": torch.tensor(0.02)},
    ),
    Format("fp8-vllm", FP8, float8(shape=one), extra=INPUT_SCALE),
    Format(
        "mxfp8",
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        float8(1, 32, SCALE_INV, torch.uint8),
    ),
    Format(
        "fbgemm-fp8",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        float8(1),
        extra={".input_scale_ub": torch.tensor([1200.0])},
    ),
    Format("modelopt-fp8", MODELOPT, float8(shape=scalar), extra=KV_SCALES),
    Format(
        "modelopt-fp8-own-file",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        float8(shape=scalar),
        file="hf_quant_config.json",
        extra=KV_SCALES,
    ),
    Format(
        "modelopt-fp8-blocks", MODELOPT | {"quant_algo": "FP8_PB_WO"}, float8(32, 32, shape=outer)
    ),
    Format("modelopt-nvfp4", MODELOPT | {"quant_algo": "NVFP4"}, nvfp4, extra=KV_SCALES),
    Format("mxfp4", {"quant_method": "mxfp4"}, mxfp4, GPT_OSS, which=EXPERT_WEIGHTS),
    Format("bitsandbytes-4-bit", NF4, nf4()),
    Format("bitsandbytes-4-bit-nested", NF4, nf4(nested=True)),
    Format("torchao-int8", torchao_settings("Int8WeightOnlyConfig"), torchao()),
    Format("torchao-int4", torchao_settings("IntxWeightOnlyConfig"), torchao(4)),
)
REFUSED = tuple(
    Format(name, settings, unchanged, refusal=refusal)
    for name, settings, refusal in (
        ("gptq-marlin", GPTQ | {"checkpoint_format": "marlin"}, "by GPTQ in the format 'marlin'"),
        ("awq-gemv", AWQ | {"version": "gemv"}, "by AWQ in the format 'gemv' with 4 bits"),
        ("auto-round-fp8", AUTOROUND | {"data_type": "fp"}, "by AutoRound"),
        ("auto-round-mlx", AUTOROUND | {"packing_format": "mlx"}, "AutoRound in the format 'mlx'"),
        (
            "compressed-tensors-keys",
            compressed("pack-quantized") | {"kv_cache_scheme": {"num_bits": 8}},
            "by compressed-tensors with a kv_cache_scheme",
        ),
        (
            "compressed-tensors-sparse",
            compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "by compressed-tensors with a sparsity_config",
        ),
        ("compressed-tensors-dense", compressed("dense"), "in the format 'dense'"),
        (
            "w8a8-one-scale",
            compressed("int-quantized", TOKENS | {"strategy": "tensor"}, **CHANNEL),
            "one request would change another's text",
        ),
        (
            "nvfp4",
            compressed("nvfp4-pack-quantized", TOKENS | FLOATS | {"num_bits": 4}, **NVFP4),
            "with the inputs as 4-bit float",
        ),
        ("modelopt-awq", MODELOPT | {"quant_algo": "W4A8_AWQ"}, "by ModelOpt as W4A8_AWQ"),
        (
            "bitsandbytes-8-bit",
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "to 8 bits by bitsandbytes",
        ),
        (
            "torchao-dynamic",
            torchao_settings("Int8DynamicActivationInt8WeightConfig"),
            "by torchao as Int8DynamicActivationInt8WeightConfig",
        ),
        ("hqq", {"quant_method": "hqq"}, "in the format 'hqq', which is not supported"),
        ("quanto", {"quant_method": "quanto"}, "in the format 'quanto'"),
        ("aqlm", {"quant_method": "aqlm"}, "in the format 'aqlm'"),
        ("bitnet", {"quant_method": "bitnet"}, "in the format 'bitnet'"),
        ("quark", {"quant_method": "quark"}, "in the format 'quark'"),
        ("unknown", {"quant_method": "of tomorrow"}, "in the format 'of tomorrow'"),
        ("unnamed", {"bits": 4}, "in the format 'unknown'"),
    )
)
FORMATS = (*LOADED, *REFUSED)
