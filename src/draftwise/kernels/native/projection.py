"""The projection of a native model to its vocabulary, without the layers below it."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.kernels.native.structures import DecoderCache, DecoderCall, DecoderModel
from draftwise.models.memory import ReusedMemory, ScratchMemory


def projector(whole: NativeDecoder, norm: int) -> DecoderModel:
    """A model without layers: its projection to the vocabulary behind another norm.

    Args:
        whole: the model, whose weights are shared.
        norm: address of the norm's weight, ``[hidden]`` float32. Its epsilon is that of the model.
    """
    model = DecoderModel.from_buffer_copy(whole._model)
    model.norm = norm
    model.num_layers = model.adapter_rank = 0
    return model


class NativeProjection:
    """Logits of features that another model has computed in the space of the final norm's output.

    The weights are those of the model. The kernels always normalise what they project. As the
    projection is linear, the features are normalised with a weight of ones, and the logits are
    multiplied by the root mean square that this divides by.
    """

    def __init__(self, whole: NativeDecoder) -> None:
        """Share the weights of a model.

        Args:
            whole: the model.
        """
        self._whole = whole
        self._ones = torch.ones(whole.hidden_size)
        model = projector(whole, self._ones.data_ptr())
        # The limit is not linear, so it is applied after the factor.
        self._softcap, model.logit_softcap = model.logit_softcap, 0.0
        self._model, self._cache = model, DecoderCache()
        self._scratch = ScratchMemory()
        self._logits = ReusedMemory()

    @torch.inference_mode()
    def __call__(self, features: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` float32 of features ``[rows, hidden]``."""
        features = features.float().contiguous()
        rows = len(features)
        logits = self._logits.floats(rows, self._whole.vocab_size)
        if not rows:
            return logits
        library = self._whole.library
        threads = library.threads()
        ids = np.arange(rows, dtype=np.int64)
        # One segment per row. Without layers, nothing reads the positions.
        segments = np.zeros((rows, 4), dtype=np.int64)
        segments[:, 2], segments[:, 3] = 1, ids
        call = DecoderCall(
            ctypes.addressof(self._model),
            ctypes.addressof(self._cache),
            ctypes.addressof(threads),
            ids.ctypes.data,
            segments.ctypes.data,
            ids.ctypes.data,
            logits.data_ptr(),
            self._memory_for(rows, threads.count),
            rows,
            rows,
            rows,
            1,
        )
        call.entering = features.data_ptr()
        library.decode(ctypes.byref(call))
        squares = features.square().mean(dim=1, keepdim=True)
        logits *= (squares + self._model.epsilon).sqrt()
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def _memory_for(self, num_rows: int, num_threads: int) -> int:
        """Address of the scratch memory of a call."""
        return self._scratch.address(
            self._whole.library.decoder_memory(ctypes.byref(self._model), num_rows, 1, num_threads)
        )
