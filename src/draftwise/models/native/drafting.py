"""A draft model that reads, computes and draws in one call, by the kernels of ``drafting.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.core.rules import DraftRule
from draftwise.core.sampling import LogitControls
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.kv_cache import KVCache
from draftwise.models.native import structures
from draftwise.models.native.decoder import NativeDecoder, located
from draftwise.models.native.sampling import order_memory, sampling_parameters
from draftwise.models.native.structures import DecoderCall, DraftCall

Integers = np.ndarray[Any, np.dtype[np.int64]]


def _rule_structure(rule: DraftRule) -> structures.DraftRule:
    """What the kernels read of a rule, and where they write its results."""
    results = rule.results
    arrays = (
        *(rule.weights, rule.pairs, rule.history, rule.greedy, rule.thresholds),
        *(results.expected, results.prefix_acceptance_prob),
        *(results.least, results.most, results.kept),
    )
    assert all(array.flags.c_contiguous for array in arrays)
    return structures.DraftRule(
        *(array.ctypes.data for array in arrays),
        rule.smallest_token_prob,
        rule.largest_entropy,
        rule.last_position,
        *rule.bounds,
        rule.unfiltered_limit,
        rule.min_required,
        len(rule.pairs),
        results.expected.shape[1],
    )


class DraftRun:
    """One step's drafting.

    Attributes:
        lengths: ``[requests]`` int64, tokens drafted so far.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        cache: KVCache,
        buffers: DraftBuffers,
        controls: LogitControls,
        uniforms: Tensor | None,
        signals: bool,
        limits: Sequence[int],
        rule: DraftRule | None = None,
    ) -> None:
        """Set up.

        Args:
            decoder: the draft model.
            cache: its cache.
            buffers: receive the draft.
            controls: one entry per request, without bias and penalties.
            uniforms: ``[requests, >= width]`` float64; ``None`` if all requests are greedy.
            signals: whether entropies and probabilities of drawn tokens are wanted.
            limits: ``[requests]`` most tokens of each.
            rule: says who stops before, if any; needs the signals.
        """
        self._decoder, self._cache, self._buffers = decoder, cache, buffers
        vocab_size = buffers.vocab_size
        self._uniforms = None if uniforms is None else uniforms.contiguous()
        self._controls = controls
        num_threads = torch.get_num_threads()
        self._order = order_memory(controls, num_threads, vocab_size)
        self._spare = torch.empty(num_threads, vocab_size)
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
        call.spare = self._spare.data_ptr()
        call.order = None if self._order is None else self._order.data_ptr()
        call.sampling = sampling_parameters(controls)
        call.width, call.vocab = buffers.width, vocab_size
        self._limits = np.asarray(limits, dtype=np.int64)
        self.lengths = np.zeros(len(limits), dtype=np.int64)
        buffers.is_nan.zero_()
        call.limits, call.lengths = self._limits.ctypes.data, self.lengths.ctypes.data
        if rule is not None:
            self._rule = rule, _rule_structure(rule)
            call.rule = ctypes.addressof(self._rule[1])
        self._call = call
        self._kept: list[Any] = []

    def read(
        self,
        tokens: Sequence[int],
        segments: Sequence[tuple[int, int, int]],
        logit_tokens: Sequence[int],
    ) -> None:
        """What is to be read before the first token.

        Args:
            tokens: ``[tokens]``.
            segments: row, start and number of tokens.
            logit_tokens: ``[rows]`` of which tokens the next one is drafted.
        """
        ids, wanted = (np.asarray(each, dtype=np.int64) for each in (tokens, logit_tokens))
        self._first = self._prepared(ids, located(self._cache, segments), wanted)
        self._call.first = ctypes.addressof(self._first)

    def follow(self, requests: Sequence[int], rows: Sequence[int], starts: Sequence[int]) -> None:
        """Who drafts from now on.

        Args:
            requests: ``[rows]`` index into buffers.
            rows: ``[rows]`` of the cache.
            starts: ``[rows]`` position in the text of the token drawn last; before any was drawn,
                of the last token that is read.
        """
        count = len(rows)
        segments = np.empty((count, 4), dtype=np.int64)
        segments[:, 0], segments[:, 1], segments[:, 2] = rows, starts, 1
        segments[:, 3] = np.arange(count)
        ids = self._buffers.tokens.numpy()[requests, max(self._call.position - 1, 0)]
        following = self._prepared(ids, segments, segments[:, 3].copy())
        chosen = np.array(requests, dtype=np.int64)
        self._kept = [ids, segments, chosen, following]
        call = self._call
        call.next, call.next_ids = ctypes.addressof(following), ids.ctypes.data
        call.next_segments, call.requests = segments.ctypes.data, chosen.ctypes.data
        call.num_rows = count

    def draw(self, num_positions: int) -> None:
        """So many tokens more at most, for each as far as its limit and the rule allow."""
        self._call.num_positions = num_positions
        self._decoder.draft(self._call)
        self._call.first = None

    @property
    def num_tokens(self) -> int:
        """The longest draft so far, what was no number included."""
        position: int = self._call.position
        return position

    def _prepared(self, ids: Integers, segments: Integers, wanted: Integers) -> DecoderCall:
        logits = torch.empty(len(wanted), self._decoder.vocab_size)
        call = self._decoder.prepare(self._cache, ids, segments, wanted, logits)
        call.kept = (call.kept, ids, segments, wanted, logits)
        return call
