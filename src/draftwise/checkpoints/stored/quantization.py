"""What is done with each format in which a checkpoint's weights are quantised.

The weights are expanded when they are loaded, without the package that quantised them. The model
then computes what ``transformers`` computes with an unquantised checkpoint of the expanded weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.checkpoints.stored.inputs import InputQuantization
from draftwise.checkpoints.stored.integers import awq, gptq, packed
from draftwise.checkpoints.stored.layouts import Layout
from draftwise.checkpoints.stored.scaled import (
    bitsandbytes_4bit,
    fp8_blocks,
    mxfp4_experts,
    packed_fp4,
    torchao,
    with_scale,
)
from draftwise.errors import UnsupportedModelError

REMEDY = "load the unquantised checkpoint, or a GGUF file"
# ModelOpt writes its settings to a file of their own, and newer versions to config.json as well.
_MODELOPT_FILE = "hf_quant_config.json"
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Expansion:
    """How a checkpoint's weights are expanded.

    Attributes:
        layouts: how the weights are stored. Tensors of a layout are not read by a later one.
        unused: ends of the names of tensors that do not change the weights.
        inputs: how the layers of these weights quantise their inputs; ``None`` if they do not.
    """

    layouts: tuple[Layout, ...]
    unused: tuple[str, ...] = ()
    inputs: InputQuantization | None = None


class _RefusedError(Exception):
    """Why a format is not supported, as a clause."""


def stored_quantization(config: Any, folder: str | Path) -> Settings | None:
    """The quantisation of a checkpoint's weights by its own settings; ``None`` if there is none.

    Args:
        config: its configuration.
        folder: its folder, or a hub id.
    """
    for each in (config, config.get_text_config()):
        settings = getattr(each, "quantization_config", None)
        if settings is not None:
            found: Settings = settings if isinstance(settings, Mapping) else settings.to_dict()
            return found
    file = Path(folder) / _MODELOPT_FILE
    if not file.is_file():
        return None
    quantization = json.loads(file.read_text(encoding="utf-8")).get("quantization", {})
    return {"quant_method": "modelopt", **quantization}


def expansion_of(settings: Settings, role: str, name: str) -> Expansion:
    """How quantised weights are expanded.

    Args:
        settings: a ``quantization_config``.
        role: the model's role; named in errors.
        name: the user's name for the model.

    Raises:
        UnsupportedModelError: the format is not supported.
    """
    method = _method(settings)
    try:
        if method not in _EXPANSIONS:
            raise _RefusedError(f"in the format {method!r}, which is not supported")
        return _EXPANSIONS[method](settings)
    except _RefusedError as reason:
        raise UnsupportedModelError(
            role, f"the weights of {name!r} are quantised {reason}; {REMEDY}"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            role, f"the quantization_config of {name!r} is damaged: {error!r}; {REMEDY}"
        ) from error


def _method(settings: Settings) -> str:
    for bits in (4, 8):
        if settings.get(f"load_in_{bits}bit"):
            return f"bitsandbytes_{bits}bit"
    return str(settings.get("quant_method", "unknown")).lower()


def _gptq(settings: Settings) -> Expansion:
    version = _text(settings, "checkpoint_format", "format", default="gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _RefusedError(f"by GPTQ in the format {version!r}")
    return Expansion((gptq(_group(settings), version == "gptq"),))


def _awq(settings: Settings) -> Expansion:
    version = _text(settings, "version", "format", default="gemm")
    bits = settings.get("bits", settings.get("w_bit"))
    if version != "gemm" or bits != _AWQ_BITS:
        raise _RefusedError(f"by AWQ in the format {version!r} with {bits} bits")
    return Expansion((awq(),))


def _auto_round(settings: Settings) -> Expansion:
    packing = _text(settings, "packing_format", default="auto_round:auto_gptq")
    packing = packing.removeprefix("auto_round:")
    if settings.get("data_type", "int") != "int" or settings.get("act_bits", 16) < _UNQUANTIZED:
        raise _RefusedError("by AutoRound in another way than as integers")
    if packing in ("awq", "auto_awq") and settings.get("bits") == _AWQ_BITS:
        return Expansion((awq(),))
    versions = {"gptq": True, "auto_gptq": True, "gptqmodel": False, "auto_round": False}
    if packing not in versions:
        raise _RefusedError(f"by AutoRound in the format {packing!r}")
    return Expansion((gptq(_group(settings), versions[packing]),))


def _compressed_tensors(settings: Settings) -> Expansion:
    others = {
        "kv_cache_scheme": settings.get("kv_cache_scheme"),
        "sparsity_config": (settings.get("sparsity_config") or {}).get("format", "dense")
        != "dense",
        "transform_config": (settings.get("transform_config") or {}).get("config_groups"),
    }
    for name, is_used in others.items():
        if is_used:
            raise _RefusedError(f"by compressed-tensors with a {name}, which is not supported")
    groups: list[Settings] = list((settings.get("config_groups") or {}).values())
    formats = {str(group.get("format") or settings.get("format")) for group in groups}
    unknown = formats - _UNPACKED - _PACKED_FP4 - {_PACKED}
    if unknown:
        raise _RefusedError(f"by compressed-tensors in the format {min(unknown)!r}")
    weights: list[Settings] = [group.get("weights") or {} for group in groups]
    layouts = []
    if _PACKED in formats:
        layouts.append(packed(tuple({int(each["num_bits"]) for each in weights})))
    if formats & _PACKED_FP4:
        layouts.append(packed_fp4())
    blocks = {tuple(each["block_structure"]) for each in weights if each.get("block_structure")}
    layouts.append(with_scale(blocks.pop() if len(blocks) == 1 else None))
    inputs = _inputs(groups)
    unused = (_INPUT_SCALE,) if inputs is not None and not inputs.is_dynamic else ()
    return Expansion(tuple(layouts), unused, inputs)


def _inputs(groups: list[Settings]) -> InputQuantization | None:
    """How the layers of compressed-tensors' groups quantise their inputs."""
    found = [group.get("input_activations") for group in groups]
    if any(group.get("output_activations") for group in groups):
        raise _RefusedError("by compressed-tensors, with the outputs of the layers")
    if not any(found):
        return None
    if any(each != found[0] for each in found) or not all(each.get("weights") for each in groups):
        raise _RefusedError("by compressed-tensors, with the inputs of the layers in several ways")
    inputs = dict(found[0] or {})
    kind, dynamic, strategy = inputs.get("type"), inputs.get("dynamic"), inputs.get("strategy")
    if dynamic is True and strategy == "tensor":
        raise _RefusedError(
            "by compressed-tensors, with one scale for the inputs of all requests, by which one "
            "request would change another's text"
        )
    is_known = (dynamic, strategy) in ((True, "token"), (False, "tensor"))
    bits = inputs.get("num_bits")
    if not is_known or bits != _INPUT_BITS or not inputs.get("symmetric", True):
        raise _RefusedError(f"by compressed-tensors, with the inputs as {bits}-bit {kind}")
    return InputQuantization(kind == "float", dynamic is True)


def _fp8(settings: Settings) -> Expansion:
    size = settings.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    return Expansion((fp8_blocks(block), with_scale(block)), _UNUSED)


def _modelopt(settings: Settings) -> Expansion:
    algorithm = settings.get("quant_algo")
    layers: Settings = settings.get("quantized_layers") or {}
    algorithms = {algorithm, *(each.get("quant_algo") for each in layers.values())}
    for each in sorted(map(str, algorithms - {"MIXED_PRECISION"})):
        if each not in _MODELOPT:
            raise _RefusedError(f"by ModelOpt as {each}, which is not supported")
    return Expansion((with_scale(),), _UNUSED)


def _bitsandbytes_8bit(settings: Settings) -> Expansion:
    raise _RefusedError(
        "to 8 bits by bitsandbytes, with the inputs of all requests together, by which one request "
        "would change another's text"
    )


def _torchao(settings: Settings) -> Expansion:
    kinds = settings.get("quant_type") or {}
    kind = kinds.get("default", {}).get("_type") if isinstance(kinds, Mapping) else kinds
    if kind not in _TORCHAO or set(kinds) != {"default"}:
        raise _RefusedError(f"by torchao as {kind}, which is not supported")
    return Expansion((torchao(),))


def _group(settings: Settings) -> int:
    return int(settings.get("group_size") or -1)


def _text(settings: Settings, *names: str, default: str) -> str:
    """The first of some settings that is there, in lower case."""
    found = (settings[name] for name in names if settings.get(name) is not None)
    return str(next(found, default)).lower()


_AWQ_BITS = 4
_INPUT_BITS = 8
_UNQUANTIZED = 16
_PACKED = "pack-quantized"
_PACKED_FP4 = {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}
_UNPACKED = {"naive-quantized", "int-quantized", "float-quantized", "mxfp8-quantized"}
_MODELOPT = {
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
    "W8A16",
}
_TORCHAO = {"Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"}
_INPUT_SCALE = ".input_scale"
# Scales of quantised inputs, keys and values, which are computed unquantised instead.
_UNUSED = (
    ".activation_scale",
    _INPUT_SCALE,
    ".input_scale_ub",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)
_EXPANSIONS: Mapping[str, Callable[[Settings], Expansion]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "auto_round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda _: Expansion((mxfp4_experts(),)),
    "bitsandbytes_4bit": lambda _: Expansion((bitsandbytes_4bit(),)),
    "bitsandbytes_8bit": _bitsandbytes_8bit,
    "torchao": _torchao,
}
