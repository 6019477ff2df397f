"""Forward passes over packed tokens: Hugging Face's modules as they are, or written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftwise.models.attention import PackedBatch
from draftwise.models.llama import LlamaForward, is_llama
from draftwise.models.native.decoder import NativeDecoder
from draftwise.models.native.suitability import native_decoder
from draftwise.models.packing import can_pack, pack_linear_layers
from draftwise.models.quantization import forget_quantized, has_quantized_weights
from draftwise.models.transfer import upload


class ForwardPass(Protocol):
    """Computes packed tokens and stores their keys and values."""

    def __call__(
        self, ids: Tensor, packed: PackedBatch, logit_rows: Sequence[int] | None
    ) -> Tensor | None:
        """Logits ``[len(logit_rows), vocab]`` of packed tokens ``[tokens]``; ``None`` for none."""


class ModuleForward:
    """Any model, through Hugging Face's own modules."""

    def __init__(self, model: nn.Module) -> None:
        """Take over a model that attends through :func:`packed_attention`."""
        self._model: Any = model
        parameter = next(model.parameters())
        if can_pack(parameter.dtype, parameter.device) and not has_quantized_weights(model):
            pack_linear_layers(model)

    def __call__(
        self, ids: Tensor, packed: PackedBatch, logit_rows: Sequence[int] | None
    ) -> Tensor | None:
        """See :class:`ForwardPass`."""
        arguments = {
            "input_ids": ids.unsqueeze(0),
            "position_ids": packed.positions.unsqueeze(0),
            "use_cache": False,
            "packed": packed,
        }
        if logit_rows is None:
            self._model.base_model(**arguments)
            return None
        keep = upload(logit_rows, torch.long, ids.device)
        logits: Tensor = self._model(**arguments, logits_to_keep=keep).logits
        return logits[0]


def native_pass(model: nn.Module) -> NativeDecoder | None:
    """Our own kernels for a whole pass, taking the model over; ``None`` where there are none."""
    if not is_llama(model) or has_quantized_weights(model):
        return None
    return native_decoder(model)


def forward_pass(model: nn.Module) -> ForwardPass:
    """The fastest forward pass in PyTorch's operations for a model; takes the model over."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            forget_quantized(layer)
    if is_llama(model) and not has_quantized_weights(model):
        return LlamaForward(model)
    return ModuleForward(model)
