"""Enlarge a checkpoint of Llama or Qwen3.5 without changing its function.

Speculative decoding is studied with a target that generates sensible text at the cost of a large
model. This module makes such a target from a small trained checkpoint. It replicates the residual
stream, the attention heads and the MLP units, and adds layers whose output is zero:

- x' = [x, …, x] has the mean square of x, so RMSNorm is unchanged.
- A matrix that reads x' contains the source's matrix in every column block, multiplied by
  coefficients that sum to one. They are powers of two, hence exact in every floating-point format.
- A matrix that writes to x' contains the source's rows in every row block. Its columns, over the
  replicated heads or units, are multiplied by coefficients in the same way.
- Tied embeddings both read and write x'. Their rows are replicated, and the coefficients of the
  output side are part of the weight of the final norm. Qwen3.5 adds 1 to this weight, so its
  embeddings are not tied any more.
- A gated delta net has more heads, each with its convolutions and its decay. The norms of queries,
  keys and outputs are norms of a head, so they stay. The MTP layer is replicated as well.
- An added layer has random projections, but those that write to x' are zero. A Qwen3.5 gets whole
  periods of layers.

The output differs from the source's only by float32 rounding. The speed is that of a model of the
new size. Results obtained with an inflated model must be labelled as such. Its configuration has
the field ``draftwise_inflated``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from draftwise.errors import DraftwiseError, ModelNotFoundError, UnsupportedModelError
from draftwise.training.mtp import is_mtp_tensor
from draftwise.zoo.inflation_plan import (
    HYBRID,
    INFLATE_VERSION,
    InflationPlan,
    choose_plan,
    inflated_positions,
    is_hybrid,
    is_tied,
    parse_num_parameters,
    period_of,
)

_INITIAL_STANDARD_DEVIATION = 0.02
_LAYER = "model.layers."
_MTP, _MTP_LAYER = "mtp.", "mtp.layers.0."
_WRITES_STREAM = ("o_proj", "down_proj", "out_proj")
_READS_STREAM = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    *("in_proj_z", "in_proj_a", "in_proj_b"),
)
# Queries, keys and values of a delta net, one after the other.
_CONVOLVED = ("in_proj_qkv", "conv1d")
_NORMS_OF_A_HEAD = ("q_norm", "k_norm", "norm")


def power_of_two_coefficients(count: int) -> list[float]:
    """Return ``count`` powers of two that sum to one, as equal as possible."""
    coefficients = [1.0]
    while len(coefficients) < count:
        # The list is descending, so halving its head keeps the spread within a factor of two.
        half = coefficients.pop(0) / 2
        coefficients = sorted([*coefficients, half, half], reverse=True)
    return coefficients


def read_copies(weight: Tensor, copies: int, streams: int = 1) -> Tensor:
    """Replicate the columns of a matrix that reads the residual stream.

    Args:
        weight: ``[out, streams * in]``.
        copies: number of copies of each stream.
        streams: number of streams that the matrix reads side by side.

    Returns:
        ``[out, streams * copies * in]``. Of each stream, block *i* is multiplied by coefficient
        *i*.
    """
    coefficients = power_of_two_coefficients(copies)
    parts = weight.chunk(streams, dim=1)
    return torch.cat([part * factor for part in parts for factor in coefficients], dim=1)


def repeat(weight: Tensor, copies: int, streams: int = 1) -> Tensor:
    """Repeat each stream along the first dimension: ``[streams * n, …]`` to ``copies`` times it."""
    return torch.cat([part for part in weight.chunk(streams) for _ in range(copies)])


def replicate_layer(
    weights: Mapping[str, Tensor], plan: InflationPlan, streams: int = 1, parts: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Replicate a decoder layer in the format of Llama or Qwen3.5.

    Args:
        weights: its tensors by name, such as ``self_attn.q_proj.weight``.
        plan: numbers of copies.
        streams: number of streams that its attention reads side by side.
        parts: sizes of queries, keys and values of a delta net.
    """
    result = {}
    for name, weight in weights.items():
        module, kind = name.rsplit(".", 2)[-2:]
        inner = plan.num_mlp_copies if "mlp." in name else plan.num_copies
        if module in _NORMS_OF_A_HEAD:
            result[name] = weight
        elif module in _CONVOLVED:
            width = weight if module == "conv1d" else read_copies(weight, plan.num_copies)
            pieces = [repeat(each, plan.num_copies) for each in torch.split(width, list(parts))]
            result[name] = torch.cat(pieces)
        elif module in _WRITES_STREAM:
            width = weight if kind == "bias" else read_copies(weight, inner)
            result[name] = repeat(width, plan.num_copies)
        elif module in _READS_STREAM:
            # Heads are repeated as one block, so every query head keeps its kv head.
            count = streams if "self_attn." in name else 1
            width = weight if kind == "bias" else read_copies(weight, plan.num_copies, count)
            result[name] = repeat(width, inner)
        else:
            result[name] = repeat(weight, plan.num_copies)
    return result


def _identity_layer(like: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    result = {}
    for name, weight in like.items():
        module, kind = name.rsplit(".", 2)[-2:]
        if module.endswith("layernorm"):
            result[name] = torch.ones_like(weight)
        elif kind == "bias" or module in _WRITES_STREAM:
            result[name] = torch.zeros_like(weight)
        else:
            noise = torch.randn(weight.shape, generator=generator) * _INITIAL_STANDARD_DEVIATION
            result[name] = noise.to(weight.dtype)
    return result


def inflate_weights(
    weights: Mapping[str, Tensor], config: PreTrainedConfig, plan: InflationPlan, seed: int
) -> dict[str, Tensor]:
    """Return the tensors of the inflated model in the same dtype, without a tied head."""
    generator = torch.Generator().manual_seed(seed)
    copies = plan.num_copies
    norm = weights["model.norm.weight"]
    embedding = torch.cat([weights["model.embed_tokens.weight"]] * copies, dim=1)
    result = {"model.embed_tokens.weight": embedding}
    if is_tied(config, copies):
        coefficients = power_of_two_coefficients(copies)
        result["model.norm.weight"] = torch.cat([norm * c for c in coefficients])
    else:
        result["model.norm.weight"] = repeat(norm, copies)
        result["lm_head.weight"] = read_copies(weights["lm_head.weight"], copies)
    positions = inflated_positions(config, plan.num_layers)
    parts = _parts(config)
    inflated = {}
    for source, position in enumerate(positions):
        layer = _beginning_with(f"{_LAYER}{source}.", weights)
        inflated[position] = replicate_layer(layer, plan, parts=parts)
    for position in range(plan.num_layers):
        like = inflated[positions[position % period_of(config)]]
        layer = inflated.get(position) or _identity_layer(like, generator)
        result.update({f"{_LAYER}{position}.{name}": weight for name, weight in layer.items()})
    result.update(_replicated_mtp(_beginning_with(_MTP, weights), plan))
    return {name: weight.contiguous() for name, weight in result.items()}


def _replicated_mtp(weights: Mapping[str, Tensor], plan: InflationPlan) -> dict[str, Tensor]:
    """The tensors of an MTP layer, if there is one; it reads an embedding and a state."""
    inner = _beginning_with(_MTP_LAYER.removeprefix(_MTP), weights)
    result = {_MTP_LAYER + name: each for name, each in replicate_layer(inner, plan).items()}
    for name, weight in weights.items():
        if not (_MTP + name).startswith(_MTP_LAYER):
            width = weight if weight.ndim == 1 else read_copies(weight, plan.num_copies, 2)
            result[_MTP + name] = repeat(width, plan.num_copies)
    return result


def _beginning_with(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def _parts(config: PreTrainedConfig) -> tuple[int, ...]:
    """Sizes of the queries, keys and values of a delta net; none without one."""
    if not is_hybrid(config):
        return ()
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def _load_source(source: Path) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    if not (source / "config.json").is_file():
        raise ModelNotFoundError("source", f"{source} is not a model folder: it has no config.json")
    config = AutoConfig.from_pretrained(str(source))
    if config.model_type not in ("llama", HYBRID):
        raise UnsupportedModelError(
            "source",
            "only checkpoints of Llama and of the text part of Qwen3.5 can be inflated; "
            f"{source} is a {config.model_type}",
        )
    period = period_of(config)
    kinds = getattr(config, "layer_types", None) or []
    if kinds != kinds[:period] * (len(kinds) // period):
        raise UnsupportedModelError("source", f"the layers of {source} do not repeat in periods")
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype="auto")
    # A model is loaded without its MTP layer.
    stored = [load_file(file) for file in sorted(source.glob("*.safetensors"))]
    mtp = {name: each for file in stored for name, each in file.items() if is_mtp_tensor(name)}
    return config, {**model.state_dict(), **mtp}


@dataclass(frozen=True)
class InflationReport:
    """Source and shape of an inflated model."""

    source: str
    source_parameters: int
    num_parameters: int
    num_copies: int
    num_mlp_copies: int
    source_layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    seed: int


def _write_config(
    source: Path, destination: Path, config: PreTrainedConfig, plan: InflationPlan, label: object
) -> None:
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # The loaded configuration also has the values that a file leaves at their defaults.
    replicated = ["hidden_size", "num_attention_heads", "num_key_value_heads"]
    if is_hybrid(config):
        replicated += ["linear_num_key_heads", "linear_num_value_heads"]
        period = config.layer_types[: period_of(config)]
        values["layer_types"] = period * (plan.num_layers // len(period))
        values["tie_word_embeddings"] = is_tied(config, plan.num_copies)
    for name in replicated:
        values[name] = getattr(config, name) * plan.num_copies
    values["intermediate_size"] = config.intermediate_size * plan.num_mlp_copies
    values["num_hidden_layers"] = plan.num_layers
    values["draftwise_inflated"] = label
    text = json.dumps(values, indent=2) + "\n"
    (destination / "config.json").write_text(text, encoding="utf-8")


def _write_card(destination: Path, report: InflationReport) -> None:
    added = report.num_layers - len(report.source_layers)
    text = f"""---
license: apache-2.0
tags: [draftwise, inflated]
---

# Inflated model: {report.num_parameters:,} parameters with the function of {report.source}

Made by `draftwise.zoo.inflate` from `{report.source}` ({report.source_parameters:,} parameters):
the residual stream is replicated {report.num_copies} times and the MLP units
{report.num_mlp_copies} times, and {added} identity layers are added (seed {report.seed}). The
outputs equal those of the source within rounding; only the cost is that of a larger model.
Measurements made with it must be labelled as made with an inflated model.
"""
    (destination / "README.md").write_text(text, encoding="utf-8")


def inflate(source: Path, destination: Path, num_parameters: int, seed: int = 0) -> InflationReport:
    """Write to ``destination`` a model of about ``num_parameters`` with the function of ``source``.

    Both are folders in the format of Hugging Face. The dtype is kept, and tokenizer files are
    copied. Raises :class:`ModelNotFoundError`, :class:`UnsupportedModelError` (another
    architecture) or :class:`InvalidParameterError` (smaller than the source).
    """
    config, weights = _load_source(source)
    plan = choose_plan(config, num_parameters)
    inflated = inflate_weights(weights, config, plan, seed)
    tied = config.tie_word_embeddings
    report = InflationReport(
        source=source.name,
        source_parameters=sum(
            weight.numel()
            for name, weight in weights.items()
            if not ((tied and name == "lm_head.weight") or is_mtp_tensor(name))
        ),
        num_parameters=plan.num_parameters,
        num_copies=plan.num_copies,
        num_mlp_copies=plan.num_mlp_copies,
        source_layers=inflated_positions(config, plan.num_layers),
        num_layers=plan.num_layers,
        hidden_size=config.hidden_size * plan.num_copies,
        seed=seed,
    )
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and ("token" in path.name or path.name.endswith(".jinja")):
            shutil.copyfile(path, destination / path.name)
    if (source / "generation_config.json").exists():
        shutil.copyfile(source / "generation_config.json", destination / "generation_config.json")
    save_file(inflated, destination / "model.safetensors", metadata={"format": "pt"})
    label = {"version": INFLATE_VERSION, **asdict(report)}
    _write_config(source, destination, config, plan, label)
    _write_card(destination, report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m draftwise.zoo.inflate",
        description="Enlarge a checkpoint of Llama or Qwen3.5 without changing its function.",
    )
    parser.add_argument("source", type=Path, help="model folder")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--parameters", required=True, help="approximate size, for example 200M")
    parser.add_argument("--seed", type=int, default=0, help="seed of the added layers")
    arguments = parser.parse_args(argv)
    try:
        size = parse_num_parameters(arguments.parameters)
        report = inflate(arguments.source, arguments.destination, size, arguments.seed)
    except DraftwiseError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(report), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
