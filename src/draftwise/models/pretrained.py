"""Hugging Face causal language models, run on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.models.fast_path import slow_path
from draftwise.models.forward import forward_pass, native_pass
from draftwise.models.hidden_states import final_norm
from draftwise.models.packed_model import PackedModel
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
        ids = checks.probe_ids(max_model_len)
        expected = checks.own_logits(ids)
        layers = checks.learn_layers(ids, max_model_len)
        why_slow = slow_path(model)  # asked before the weights are packed
        if checks.embedding.weight.dtype == torch.float32:
            checks.compare_implementations(ids, expected)
        else:
            is_native = why_slow is None and ids.device.type == "cpu"
            check_structure(checks, layers, ids, is_native)
        native = native_pass(model)
        super().__init__(
            role,
            checks.family,
            layers,
            expected.shape[-1],
            checks.hidden_size,
            checks.embedding.weight.detach(),
            native,
            None if native else forward_pass(model),
            why_slow,
        )
        checks.compare(self, ids[0], expected)
        if self._decoder is not None and self.device.type == "cuda":
            self._decoder.compile(self.new_cache(1, 1))
            self.step_mode = StepMode.GRAPHS
            checks.compare(self, ids[0], expected)

    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """The norm between the last layer and the projection to the vocabulary.

        Raises:
            UnsupportedModelError: it is not found.
        """
        return final_norm(self._model)
