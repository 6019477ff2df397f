"""Passes of a head that drafts blocks with the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.native.decoder import checked_segments
from draftwise.kernels.native.head import NativeHead
from draftwise.models.kv_cache import KVCache


class NativeBlockHead(NativeHead):
    """A head of DFlash or DSpark without its Markov head.

    A pass over the context stores its keys and values. A pass over blocks is one of a decoder whose
    rows attend to each other; see :meth:`view`.
    """

    def view(self, layer: int, is_causal: bool, shares_window: bool) -> None:
        """Set what the rows of blocks attend to in a layer.

        Args:
            layer: index of the layer.
            is_causal: whether a row attends to the rows of the block up to itself only.
            shares_window: whether the window of all rows is that of the first one.
        """
        self._layers[layer].sees_segment = not is_causal
        self._layers[layer].shares_window = shares_window

    @torch.inference_mode()
    def read_context(
        self, cache: KVCache, states: Tensor, segments: Sequence[tuple[int, int, int]]
    ) -> None:
        """Write the keys and values of a context.

        Args:
            cache: this head's cache.
            states: ``[rows, state_size]`` the target's states, in the dtype of the weights.
            segments: cache slot, start and number of rows of each request.
        """
        where = checked_segments(cache, segments)
        none = np.empty(0, dtype=np.int64)
        ids = np.zeros(len(states), dtype=np.int64)
        call = self.prepare(cache, ids, where, none, self.logits_memory(0))
        states = states.contiguous()
        call.states = states.data_ptr()
        self._library.decode(ctypes.byref(call))

    @torch.inference_mode()
    def read_blocks(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        segments: Sequence[tuple[int, int, int]],
        rows: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute blocks behind their contexts.

        Args:
            cache: this head's cache.
            tokens: ``[rows of all blocks]`` token ids of the target, block after block.
            segments: cache slot, start and number of rows of each block.
            rows: indices of the rows whose results are returned.

        Returns:
            ``[len(rows), hidden]`` float32 after the final norm, and logits
            ``[len(rows), draft_vocab]`` float32; ``None`` if the target projects to its vocabulary.
        """
        ids, where = self.checked(cache, tokens, segments)
        wanted = np.asarray(rows, dtype=np.int64)
        logits = self.logits_memory(len(wanted))
        call = self.prepare(cache, ids, where, wanted, logits)
        if not self.vocab_size:
            call.logits = None
        hidden = torch.empty(len(wanted), self.hidden_size)
        places = np.arange(len(wanted))
        call.carried, call.carried_rows = hidden.data_ptr(), places.ctypes.data
        self._library.decode(ctypes.byref(call))
        return hidden, logits if self.vocab_size else None
