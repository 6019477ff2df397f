"""Fingerprints that identify a model by its configuration and weights, not by its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftwise.checkpoints.hub import checkpoint_folder
from draftwise.checkpoints.quantization import (
    BlockRows,
    StoredRows,
    stored_experts,
    stored_rows,
)
from draftwise.checkpoints.stored.loading import load_checkpoint
from draftwise.checkpoints.stored.quantization import stored_quantization
from draftwise.errors import ModelNotFoundError

# Values hashed per weight. A few are enough, as fine-tuning changes nearly all of them.
_NUM_SAMPLES = 64
# Settings that describe where a model comes from or how it runs, not what it computes.
_INCIDENTAL = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_NUM_DIGITS = 16


def model_fingerprint(model: nn.Module, quantization: str | None = None) -> str:
    """Hash of a model's configuration, its weights' names and shapes, and some of their values.

    It is the same on every device. Values are hashed as bfloat16, so that weights loaded as float32
    and as bfloat16 have the same hash.

    Args:
        model: a loaded model that is not packed or quantised yet.
        quantization: the quantisation that will be applied to it.
    """
    return _digest(model.config, quantization, _weights(model, model.named_parameters()))


def layer_fingerprint(settings: str, layer: nn.Module) -> str:
    """Hash of some settings, and of a layer's weights as in :func:`model_fingerprint`.

    Args:
        settings: what else distinguishes it.
        layer: a layer that is not packed or quantised yet.
    """
    return _digest_of(settings, _weights(layer, layer.state_dict().items()))


def _weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, list[int], Tensor]]:
    """Name, shape and hashed values of a model's tensors, which may be in the blocks of a file."""
    modules = dict(model.named_modules())
    for name, tensor in sorted(tensors):
        if tensor.is_meta:
            owner, _, attribute = name.rpartition(".")
            experts = stored_experts(modules[owner]).get(attribute)
            samples = _samples_of_rows(experts or stored_rows(modules[owner]))
        else:
            samples = sampled_bits(tensor)
        yield name, list(tensor.shape), samples


def _samples_of_rows(stored: Sequence[StoredRows]) -> Tensor:
    """Some bytes of the blocks of a file."""
    parts = [part.data.reshape(-1) for part in stored if isinstance(part, BlockRows)]
    return torch.from_numpy(np.concatenate([part[_places(len(part)).numpy()] for part in parts]))


def tensors_fingerprint(settings: str, tensors: Mapping[str, Tensor]) -> str:
    """Hash of some settings, of the names and shapes of tensors, and of some of their values.

    Args:
        settings: what else distinguishes them; may be empty.
        tensors: the tensors by name.
    """
    weights = (
        (name, list(tensor.shape), sampled_bits(tensor)) for name, tensor in sorted(tensors.items())
    )
    return _digest_of(settings, weights)


def checkpoint_fingerprint(
    name: str | Path,
    role: str = "model",
    revision: str | None = None,
    cache_folder: str | None = None,
) -> str:
    """:func:`model_fingerprint` of a model's files, without loading the model.

    Only the hashed values are read, so that it is fast for models of any size. Where the names or
    shapes in the files differ from the model's, the model is loaded.

    Args:
        name: a folder with ``config.json`` and safetensors files, or a hub id. Files of the hub
            that are not in the local cache are downloaded.
        role: the model's role; named in errors.
        revision: revision in the hub; ``None`` for the default one.
        cache_folder: folder of downloaded models; ``None`` for that of huggingface_hub.

    Raises:
        ModelNotFoundError: there is no such folder or hub id, or it contains no weights.
    """
    path = checkpoint_folder(str(name), role, revision, cache_folder)
    files = sorted(path.glob("*.safetensors"))
    if not files or not (path / "config.json").is_file():
        raise ModelNotFoundError(role, f"{str(name)!r} has no config.json or safetensors weights")
    config = AutoConfig.from_pretrained(path)
    if stored_quantization(config, path) is not None:
        return _loaded_fingerprint(path, config, role, str(name))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    wanted = {name: list(weight.shape) for name, weight in empty.named_parameters()}
    where = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            where.update(dict.fromkeys(tensors.keys(), file))

    def part(name: str) -> Any:
        with safe_open(where[name], framework="pt") as tensors:
            return tensors.get_slice(name)

    if not all(name in where and part(name).get_shape() == wanted[name] for name in wanted):
        # The files store weights in another layout than the model, as is common for experts.
        return _loaded_fingerprint(path, config, role, str(name))
    weights = ((name, wanted[name], _samples_of_file(part(name))) for name in sorted(wanted))
    return _digest(config, None, weights)


def _loaded_fingerprint(path: Path, config: Any, role: str, name: str) -> str:
    model, _ = load_checkpoint(
        AutoModelForCausalLM, str(path), config, role, name, dtype=torch.bfloat16
    )
    return model_fingerprint(model)


def _digest(
    config: Any, quantization: str | None, weights: Iterable[tuple[str, list[int], Tensor]]
) -> str:
    return _digest_of(json.dumps([_settings(config), quantization]), weights)


def _digest_of(settings: str, weights: Iterable[tuple[str, list[int], Tensor]]) -> str:
    digest = hashlib.sha256(settings.encode())
    for name, shape, samples in weights:
        digest.update(json.dumps([name, shape]).encode())
        digest.update(samples.numpy().tobytes())
    return digest.hexdigest()[:_NUM_DIGITS]


def _settings(config: Any) -> Any:
    kept = {k: v for k, v in config.to_dict().items() if k[0] != "_" and k not in _INCIDENTAL}
    return json.loads(json.dumps(kept, sort_keys=True, default=str))


def _places(size: int) -> Tensor:
    """Evenly spaced indices of the values that are hashed."""
    count = min(_NUM_SAMPLES, size)
    return torch.arange(count) * size // max(count, 1)


def _bits(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).cpu().view(torch.int16)


@torch.no_grad()
def sampled_bits(parameter: Tensor) -> Tensor:
    """The values of a weight that are hashed, as the bits of bfloat16 in int16."""
    flat = parameter.detach().flatten()
    return _bits(flat[_places(len(flat)).to(flat.device)])


def _samples_of_file(part: Any) -> Tensor:
    """The hashed values of a tensor in a file, read row by row."""
    rows, *rest = part.get_shape() or [1]
    width = torch.Size(rest).numel()
    places = _places(rows * width).tolist()
    values = [part[at // width : at // width + 1].flatten()[at % width] for at in places]
    return _bits(torch.stack(values) if values else torch.zeros(0))
