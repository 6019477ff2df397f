"""Hugging Face causal language models, run on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftwise.checkpoints.quantization import has_stored_weights, stored_rows
from draftwise.kernels.native.suitability import why_not_packed_whole
from draftwise.models.fast_path import slow_path
from draftwise.models.float_copy import FloatCopy
from draftwise.models.forward import forward_pass, native_pass
from draftwise.models.hidden_states import final_norm
from draftwise.models.packed_model import LazyEmbedding, PackedModel
from draftwise.models.packed_modules import has_packed_modules, pack_modules
from draftwise.models.recurrent.functions import replace_recurrent_functions
from draftwise.models.static_steps import StepMode
from draftwise.models.structure import Checks, check_structure


class PretrainedModel(PackedModel):
    """A Hugging Face causal language model, run on packed tokens."""

    def __init__(self, model: nn.Module, role: str, max_model_len: int) -> None:
        """Prepare a loaded model. The model loses the weights that are packed.

        Raises:
            UnsupportedModelError: packed attention gives other logits than the model's own.
            NumericalError: the model's weights give no finite logits.
        """
        self._model: Any = model.eval()
        checks = Checks(model, role)
        replace_recurrent_functions(model)
        ids = checks.probe_ids(max_model_len)
        stored = has_stored_weights(model)
        copied = None
        if stored and why_not_packed_whole(model) is not None:
            copied = FloatCopy(model, ids)
            pack_modules(model)
        is_packed = has_packed_modules(model)
        # Modules without weights cannot be asked. Their first layers are compared in float32.
        expected = None if stored and not is_packed else checks.own_logits(ids)
        shapes = checks.learn_layers(ids, max_model_len)
        why_slow = slow_path(model)  # asked before the weights of layers are packed
        if expected is not None and checks.embedding.weight.dtype == torch.float32:
            checks.compare_implementations(ids, expected)
        else:
            is_native = why_slow is None and ids.device.type == "cpu"
            part = copied or FloatCopy(model, ids)
            check_structure(checks, part, shapes, is_native, max_model_len)
        vocab_size = checks.vocab_size
        embedding = checks.embedding.weight.detach()
        rows = stored_rows(checks.embedding)
        native = native_pass(model)
        super().__init__(
            role,
            checks.family,
            shapes.layers,
            vocab_size if expected is None else expected.shape[-1],
            checks.hidden_size,
            LazyEmbedding(rows, embedding.dtype) if embedding.is_meta else embedding,
            native,
            None if native else forward_pass(model),
            why_slow,
            shapes.recurrent,
        )
        if expected is None:
            checks.check_finite(self, ids)
            return
        checks.compare(self, ids[0], expected)
        if self._decoder is not None and self.device.type == "cuda":
            self._decoder.compile(self.new_cache(1, 1))
            self.step_mode = StepMode.GRAPHS
            checks.compare(self, ids[0], expected)

    @property
    def module(self) -> nn.Module:
        """The model of transformers. What the native kernels compute has lost its weights."""
        return cast(nn.Module, self._model)

    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """The norm between the last layer and the projection to the vocabulary.

        Raises:
            UnsupportedModelError: it is not found.
        """
        return final_norm(self._model)
