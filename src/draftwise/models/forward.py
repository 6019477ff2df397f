"""Forward passes over packed tokens: Hugging Face's own modules, or Draftwise's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftwise.checkpoints.quantization import forget_stored, has_quantized_weights
from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.kernels.native.suitability import native_decoder
from draftwise.models.attention_interface import following
from draftwise.models.blocked_linear import block_linear_layers, can_block
from draftwise.models.decoder import DecoderForward
from draftwise.models.decoder_families import (
    decoder_spec,
    why_not_described,
    why_not_operations,
)
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.hidden_states import StateTap, tapped_modules
from draftwise.models.memory import upload
from draftwise.models.module_parts import ModuleParts
from draftwise.models.packed_modules import has_packed_modules
from draftwise.models.packing import PackedBatch


class ForwardPass(Protocol):
    """Computes packed tokens and stores their keys and values."""

    def __call__(
        self,
        ids: Tensor,
        packed: PackedBatch,
        logit_rows: Sequence[int] | None,
        tap: StateTap | None = None,
    ) -> Tensor | None:
        """Compute a pass.

        Args:
            ids: ``[tokens]`` token ids.
            packed: plan of this forward pass.
            logit_rows: indices of the tokens whose logits are returned; ``None`` for no logits.
            tap: collects hidden states of all tokens; ``None`` for none.

        Returns:
            Logits ``[len(logit_rows), vocab]``, or ``None`` where none are requested.
        """

    def part(
        self,
        ids: Tensor,
        packed: PackedBatch,
        logit_rows: Sequence[int] | None,
        layers: range,
        entering: Tensor | None,
        adapter: ExitAdapter | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute some of the layers.

        Args:
            ids: ``[tokens]`` token ids.
            packed: plan of this forward pass.
            logit_rows: indices of the tokens whose logits are returned; ``None`` for no logits.
            layers: indices of the layers.
            entering: ``[tokens, hidden]`` residual stream before the first of them; ``None`` to
                embed the tokens.
            adapter: maps the stream for the logits; ``None`` for none.

        Returns:
            Logits ``[len(logit_rows), vocab]`` or ``None``, and the stream ``[tokens, hidden]``
            after the last of the layers.
        """

    def project(self, features: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of features ``[rows, hidden]``.

        Features are in the space of the hidden states after the final norm.
        """


class ModuleForward:
    """The forward pass of any model, by Hugging Face's own modules."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare a model with packed attention, and pack its linear layers if possible."""
        self._model: Any = model
        parameter = next(model.parameters())
        if can_block(parameter.dtype, parameter.device) and not has_quantized_weights(model):
            block_linear_layers(model)
        self._parts: ModuleParts | None = None

    def __call__(
        self,
        ids: Tensor,
        packed: PackedBatch,
        logit_rows: Sequence[int] | None,
        tap: StateTap | None = None,
    ) -> Tensor | None:
        """See :class:`ForwardPass`."""
        if tap is None:
            return self._run(ids, packed, logit_rows)
        with tapped_modules(self._model, tap, len(ids)):
            return self._run(ids, packed, logit_rows)

    def part(
        self,
        ids: Tensor,
        packed: PackedBatch,
        logit_rows: Sequence[int] | None,
        layers: range,
        entering: Tensor | None,
        adapter: ExitAdapter | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """See :class:`ForwardPass`.

        Raises:
            UnsupportedModelError: the model's layers are not found.
        """
        self._parts = self._parts or ModuleParts(self._model)
        with self._parts.only(layers, entering, adapter) as leaving:
            logits = self._run(ids, packed, logit_rows)
        return logits, leaving[0]

    def project(self, features: Tensor) -> Tensor:
        """See :class:`ForwardPass`.

        What a few models do with the output of their projection, such as scaling it, is left out.
        """
        logits: Tensor = self._model.get_output_embeddings()(features)
        return logits

    def _run(
        self, ids: Tensor, packed: PackedBatch, logit_rows: Sequence[int] | None
    ) -> Tensor | None:
        arguments = {
            "input_ids": ids.unsqueeze(0),
            "position_ids": packed.positions.unsqueeze(0),
            "use_cache": False,
        }
        with following(packed):
            if logit_rows is None:
                self._model.base_model(**arguments)
                return None
            keep = upload(logit_rows, torch.long, ids.device)
            logits: Tensor = self._model(**arguments, logits_to_keep=keep).logits
        return logits[0]


def native_pass(model: nn.Module) -> NativeDecoder | None:
    """Pack a model for the native kernels, which compute whole passes. The model loses its weights.

    Returns:
        The packed model; ``None`` if the kernels do not support it.
    """
    is_described = why_not_described(model) is None and not has_quantized_weights(model)
    return native_decoder(model) if is_described and not has_packed_modules(model) else None


def forward_pass(model: nn.Module) -> ForwardPass:
    """The fastest forward pass of a model in PyTorch operations. The model loses packed weights."""
    if has_packed_modules(model):
        return ModuleForward(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            forget_stored(layer)
    if why_not_operations(model) is None and not has_quantized_weights(model):
        return DecoderForward(decoder_spec(model))
    return ModuleForward(model)
