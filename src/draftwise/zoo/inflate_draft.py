"""Enlarges a head or an exit of a bundled target, so that it fits the inflated target.

The function stays the same, as for the target (see :mod:`draftwise.zoo.inflate`), and the cost is
that of a head or an adapter of the new width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from draftwise.errors import UnsupportedModelError
from draftwise.zoo.inflate import read_copies, repeat, replicate_layer
from draftwise.zoo.inflation_plan import (
    INFLATE_VERSION,
    InflationPlan,
    choose_plan,
    source_layer_positions,
)

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_STATES = "eagle_aux_hidden_state_layer_ids"
_LAYER = "layers.0."


def inflate_draft(source: Path, target: Path, destination: Path, num_parameters: int) -> None:
    """Write the head or exit ``source`` of a target for the inflated target.

    Args:
        source: folder of a head in the layout of ``speculators``, or of an exit with an adapter.
        target: folder of the target before the inflation.
        destination: folder to write.
        num_parameters: approximate size of the inflated target.

    Raises:
        InvalidParameterError: the target is larger than ``num_parameters``.
        UnsupportedModelError: the draft is something else.
    """
    shape = AutoConfig.from_pretrained(str(target))
    plan = choose_plan(shape, num_parameters)
    config: dict[str, Any] = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(source / _WEIGHTS)
    if config.get("speculators_model_type") == "eagle3":
        config, tensors = _inflated_head(config, tensors, shape, plan)
    elif config.get("draftwise_model_type") == "exit":
        config, tensors = _inflated_exit(config, tensors, shape, plan)
    else:
        raise UnsupportedModelError("source", f"{str(source)!r} is neither a head nor an exit")
    config["draftwise_inflated"] = {"version": INFLATE_VERSION, "num_copies": plan.num_copies}
    destination.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, destination / _WEIGHTS, metadata={"format": "pt"})
    (destination / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _num_layers_before(shape: LlamaConfig, plan: InflationPlan, num_layers: int) -> int:
    """Number of layers of the inflated target that end where ``num_layers`` of the source end."""
    positions = source_layer_positions(shape.num_hidden_layers, plan.num_layers)
    return positions[num_layers - 1] + 1 if num_layers else 0


def _inflated_head(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shape: LlamaConfig,
    plan: InflationPlan,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    states = config.get(_STATES)
    layer = dict(config["transformer_layer_config"])
    if not states or layer["num_hidden_layers"] != 1:
        raise UnsupportedModelError(
            "source", f"only heads of one layer with {_STATES} can be inflated"
        )
    target_hidden = config.get("target_hidden_size") or layer["hidden_size"]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        layer[name] *= plan.num_copies
    layer["intermediate_size"] *= plan.num_mlp_copies
    result = dict(config) | {
        "transformer_layer_config": layer,
        "target_hidden_size": target_hidden * plan.num_copies,
        # The input of a layer is the output of the layers before it.
        _STATES: [_num_layers_before(shape, plan, state) for state in states],
    }
    own = {
        name.removeprefix(_LAYER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_LAYER)
    }
    # The attention reads the embedding and the state side by side.
    replicated = replicate_layer(own, plan, streams=2)
    outside = _outside_layers(tensors, plan.num_copies, len(states))
    return result, outside | {_LAYER + name: tensor for name, tensor in replicated.items()}


def _outside_layers(
    tensors: Mapping[str, Tensor], copies: int, num_states: int
) -> dict[str, Tensor]:
    """The tensors of a head outside its layer."""
    result = {}
    for name, tensor in tensors.items():
        module = name.split(".")[0]
        if module in ("d2t", "t2d"):
            result[name] = tensor
        elif module == "embed_tokens":
            result[name] = torch.cat([tensor] * copies, dim=1)
        elif module == "lm_head":
            result[name] = read_copies(tensor, copies)
        elif module == "fc":
            result[name] = repeat(read_copies(tensor, copies, num_states), copies)
        elif module == "input_norm":
            result[name] = repeat(tensor, copies, num_states)
        elif module in ("norm", "fc_norm"):
            result[name] = repeat(tensor, copies)
        elif module != "layers":
            raise UnsupportedModelError("source", f"the head has an unknown tensor {name!r}")
    return result


def _inflated_exit(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shape: LlamaConfig,
    plan: InflationPlan,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    copies = plan.num_copies
    result = dict(config) | {
        "exit": _num_layers_before(shape, plan, config["exit"]),
        "num_hidden_layers": plan.num_layers,
        "hidden_size": config["hidden_size"] * copies,
    }
    return result, {
        "norm.weight": repeat(tensors["norm.weight"], copies),
        "down.weight": read_copies(tensors["down.weight"], copies),
        "up.weight": repeat(tensors["up.weight"], copies),
    }
