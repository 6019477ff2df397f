"""Which model this is, whatever it is called."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

# Values read from each weight: fine-tuning changes nearly all of them.
_NUM_SAMPLES = 64
# Settings that say where a model came from or how it is run, not what it computes.
_INCIDENTAL = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_NUM_DIGITS = 16


def model_fingerprint(model: nn.Module, quantization: str | None = None) -> str:
    """Hash of a model's configuration, its weights' names and shapes, and some of their values.

    It is the same on every device, and for weights loaded as float32 or bfloat16 (values count as
    the latter).

    Args:
        model: loaded and not packed or quantised yet.
        quantization: how it is going to be quantised.
    """
    digest = hashlib.sha256(json.dumps([_settings(model), quantization]).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(json.dumps([name, list(parameter.shape)]).encode())
        digest.update(_samples(parameter).numpy().tobytes())
    return digest.hexdigest()[:_NUM_DIGITS]


def _settings(model: Any) -> Any:
    config = model.config.to_dict()
    kept = {k: v for k, v in config.items() if k[0] != "_" and k not in _INCIDENTAL}
    return json.loads(json.dumps(kept, sort_keys=True, default=str))


@torch.no_grad()
def _samples(parameter: Tensor) -> Tensor:
    """Some values, evenly spread, as the bits of bfloat16."""
    flat = parameter.detach().flatten()
    count = min(_NUM_SAMPLES, len(flat))
    index = torch.arange(count, device=flat.device) * len(flat) // max(count, 1)
    return flat[index].to(torch.bfloat16).cpu().view(torch.int16)
