"""Passes over a part of a model's layers with the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.kernels.native.structures import DecoderLayer, DecoderModel
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import ReusedMemory


class NativePart(NativeDecoder):
    """Consecutive layers of a :class:`NativeDecoder`, with its embedding, final norm and head.

    The weights and the scratch memory are those of the whole model. So a pass over a part must not
    run at the same time as another pass of the model. What enters and leaves is the residual stream
    in float32, as the kernels compute with it. So a pass over all layers and passes over its parts
    give the same results bit by bit.
    """

    def __init__(
        self, whole: NativeDecoder, first: int, end: int, adapter: ExitAdapter | None = None
    ) -> None:
        """Share the weights of a model.

        Args:
            whole: the model.
            first: index of the first layer.
            end: one past the last layer.
            adapter: what the logits are computed with; ``None`` for none.
        """
        self.__dict__.update(whole.__dict__)
        self._first_layer = first
        model = DecoderModel.from_buffer_copy(whole._model)
        model.layers += first * ctypes.sizeof(DecoderLayer)
        model.num_layers = end - first
        self._model = model
        if adapter is not None:
            # Not among the weights of the whole model.
            self._kept = list(whole._kept)
            model.adapter_norm = self._keep(adapter.norm.weight)
            model.adapter_down = self._keep_matrix(adapter.down)
            model.adapter_up = self._keep_matrix(adapter.up)
            model.adapter_rank = adapter.rank
        # These depend on the layers. The scratch memory is that of the whole model.
        self._caches = WeakKeyDictionary()
        self._sizes = {}
        if end < whole._model.num_layers:
            # Logits of a draft are still in use when the model's own are computed.
            self._logits = ReusedMemory()

    @torch.inference_mode()
    def run(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[tuple[int, int, int]],
        logit_rows: Sequence[int] | None,
        entering: Tensor | None,
        leaves: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute packed tokens and write their keys and values.

        Args:
            cache: a cache of the whole model.
            tokens: ``[tokens]`` token ids, segment after segment.
            segments: cache slot, start and number of tokens of each request.
            logit_rows: indices of the packed tokens whose logits are returned; ``None`` for none.
            entering: ``[tokens, hidden]`` float32 residual stream before the first layer; ``None``
                to embed the tokens.
            leaves: whether the residual stream after the last layer is returned.

        Returns:
            Logits ``[len(logit_rows), vocab]``, and the residual stream ``[tokens, hidden]``, both
            float32. Either is ``None`` if it is not wanted.
        """
        ids, where = self.checked(cache, tokens, segments)
        rows = np.arange(len(ids), dtype=np.int64)
        # The kernels return the stream of the rows with logits: here of all of them.
        wanted = rows if leaves else np.asarray(logit_rows or (), dtype=np.int64)
        chosen = None if logit_rows is None else list(logit_rows)
        logits = self.logits_memory(len(wanted) if chosen is not None else 0)
        call = self.prepare(cache, ids, where, wanted, logits)
        if chosen is None:
            call.logits = None
        stream = None
        if leaves:
            stream = torch.empty(len(ids), self.hidden_size)
            call.carried, call.carried_rows = stream.data_ptr(), rows.ctypes.data
        if entering is not None:
            entering = entering.contiguous()
            call.entering = entering.data_ptr()
        self._library.decode(ctypes.byref(call))
        if chosen is None:
            return None, stream
        return logits[chosen] if leaves and len(chosen) < len(ids) else logits, stream


def why_no_adapter(whole: NativeDecoder, adapter: ExitAdapter) -> str | None:
    """What the kernels need to compute an adapter for a model, as a noun; ``None`` if nothing."""
    model = whole._model
    if whole.has_quantized_weights:
        return "a target whose weights are not quantised"
    if adapter.norm.epsilon != model.epsilon:
        return f"the target's rms_norm_eps {model.epsilon}, and it is {adapter.norm.epsilon}"
    return None
