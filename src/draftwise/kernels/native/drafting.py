"""Drafting of several tokens in one call of the kernels of ``drafting.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.kernels.native.decoder import NativeDecoder, checked_segments
from draftwise.kernels.native.sampling import (
    PenaltyMemory,
    sampling_parameters,
    sampling_scratch,
)
from draftwise.kernels.native.structures import DecoderCall, DraftCall
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.kv_cache import KVCache

Integers = np.ndarray[Any, np.dtype[np.int64]]


class DraftRun:
    """The drafting of one step.

    Attributes:
        lengths: ``[requests]`` int64 number of drafted tokens so far.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        cache: KVCache,
        buffers: DraftBuffers,
        controls: LogitControls,
        token_history: TokenHistory | None,
        uniforms: Tensor | None,
        signals: bool,
        limits: Sequence[int],
        carried: Tensor | None = None,
    ) -> None:
        """Set up a step.

        Args:
            decoder: the draft model.
            cache: the draft model's cache.
            buffers: buffers that the draft is written to.
            controls: sampling parameters without masks, one entry per request.
            token_history: one entry per request; needed if penalties are used.
            uniforms: ``[requests, >= width]`` float64 random numbers; ``None`` if all requests are
                greedy.
            signals: whether to compute entropies and probabilities of sampled tokens.
            limits: ``[requests]`` maximum number of drafted tokens.
            carried: ``[requests, hidden]`` float32 memory for what a head reads in place of states
                within a draft, or ``[positions, requests, hidden]`` for the residual stream that
                the pass for each position leaves; ``None`` if neither is wanted.
        """
        self._decoder, self._cache, self._buffers = decoder, cache, buffers
        self._carried = carried
        vocab_size = buffers.vocab_size
        self._uniforms = None if uniforms is None else uniforms.contiguous()
        self._controls = controls
        num_threads = torch.get_num_threads()
        self._scratch = sampling_scratch(decoder.library, controls, num_threads, vocab_size)
        own_draft_probs = signals and (uniforms is None or controls.any_greedy)
        call = DraftCall()
        call.tokens, call.is_nan = buffers.tokens.data_ptr(), buffers.is_nan.data_ptr()
        if self._uniforms is not None:
            call.uniforms = self._uniforms.data_ptr()
            call.uniforms_width = self._uniforms.shape[1]
            call.probs = buffers.probs.data_ptr()
        if own_draft_probs:
            call.draft_probs = buffers.draft_probs.data_ptr()
        if signals:
            call.entropy = buffers.entropy.data_ptr()
            call.token_probs = buffers.token_probs.data_ptr()
        call.scratch = self._scratch.data_ptr()
        call.sampling = sampling_parameters(controls)
        self._penalties = PenaltyMemory(controls, token_history, buffers.width)
        call.penalties = self._penalties.structure
        call.width, call.vocab = buffers.width, vocab_size
        if carried is not None and carried.dim() > 2:
            call.carried_stride = carried.stride(0)
        self._limits = np.asarray(limits, dtype=np.int64)
        self.lengths = np.zeros(len(limits), dtype=np.int64)
        buffers.is_nan.zero_()
        call.limits, call.lengths = self._limits.ctypes.data, self.lengths.ctypes.data
        self._call = call
        self._keep_alive: list[Any] = []

    def read(
        self,
        tokens: Sequence[int],
        segments: Sequence[tuple[int, int, int]],
        logit_tokens: Sequence[int],
        states: Tensor | None = None,
    ) -> None:
        """Set the new tokens, which the model reads before the first token is drafted.

        Args:
            tokens: ``[tokens]`` token ids.
            segments: cache slot, start and number of tokens of each request.
            logit_tokens: ``[rows]`` index of the last token of each request that drafts.
            states: ``[tokens, size]`` states of the target that a head reads with the tokens;
                ``None`` for other models.
        """
        ids, wanted = (np.asarray(each, dtype=np.int64) for each in (tokens, logit_tokens))
        self._first = self._prepared(ids, checked_segments(self._cache, segments), wanted)
        if states is not None:
            self._first.states = states.data_ptr()
            self._first.keep_alive = self._first.keep_alive, states
        self._call.first = ctypes.addressof(self._first)

    def draw_from(self, logits: Tensor, first_rows: Sequence[int]) -> None:
        """Draw from logits that were computed before. No pass is run.

        Args:
            logits: ``[rows, vocab]`` float32 and contiguous, over the vocabulary of the buffers.
                They may change between calls, and penalties change them in place. The positions of
                a request are in consecutive rows.
            first_rows: ``[requests]`` the row of each request's first position.
        """
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        self._block_logits = logits
        self._block_rows = np.asarray(first_rows, dtype=np.int64)
        self._call.block_logits = self._block_logits.data_ptr()
        self._call.block_rows = self._block_rows.ctypes.data

    def follow(
        self, requests: Sequence[int], cache_slots: Sequence[int], starts: Sequence[int]
    ) -> None:
        """Set the requests that draft from the next call on.

        Args:
            requests: ``[rows]`` index of each request in the buffers.
            cache_slots: ``[rows]`` cache slot of each request.
            starts: ``[rows]`` position in the text of the last sampled token. Before the first
                token is sampled, position of the last new token.
        """
        count = len(cache_slots)
        segments = np.empty((count, 4), dtype=np.int64)
        segments[:, 0], segments[:, 1], segments[:, 2] = cache_slots, starts, 1
        segments[:, 3] = np.arange(count)
        ids = self._buffers.tokens.numpy()[requests, max(self._call.position - 1, 0)]
        following = self._prepared(ids, segments, segments[:, 3].copy())
        chosen = np.array(requests, dtype=np.int64)
        if self._carried is not None:
            offset = self._call.position * self._call.carried_stride * self._carried.itemsize
            for each in (self._first, following):
                each.carried = self._carried.data_ptr() + offset
                each.carried_rows = chosen.ctypes.data
        self._keep_alive = [ids, segments, chosen, following]
        call = self._call
        call.next, call.next_ids = ctypes.addressof(following), ids.ctypes.data
        call.next_segments, call.requests = segments.ctypes.data, chosen.ctypes.data
        call.num_rows = count

    def draw(self, num_positions: int) -> None:
        """Draft up to ``num_positions`` tokens per request, within its limit."""
        self._call.num_positions = num_positions
        self._decoder.draft(self._call)
        self._call.first = None

    @property
    def num_tokens(self) -> int:
        """Number of positions drafted so far, including those with NaN logits."""
        position: int = self._call.position
        return position

    @property
    def drawing_seconds(self) -> float:
        """Seconds in which tokens were sampled from logits."""
        seconds: float = self._call.drawing_s
        return seconds

    def _prepared(self, ids: Integers, segments: Integers, wanted: Integers) -> DecoderCall:
        """The arguments of a pass, with references to its arrays."""
        logits = self._decoder.logits_memory(len(wanted))
        call = self._decoder.prepare(self._cache, ids, segments, wanted, logits)
        call.keep_alive = (call.keep_alive, ids, segments, wanted, logits)
        return call
