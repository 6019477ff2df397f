"""A draft model that reads, computes and draws in one call, by the kernels of ``drafting.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls
from draftwise.core.types import DraftRule
from draftwise.models.kv_cache import KVCache
from draftwise.models.native.decoder import DecoderCall, NativeDecoder, located
from draftwise.models.native.sampling import Sampling, order_memory

Integers = np.ndarray[Any, np.dtype[np.int64]]


class _DraftRule(ctypes.Structure):
    """``DraftRule`` of ``drafting.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "history", "greedy", "exempt")),
        *((name, ctypes.c_void_p) for name in ("needed", "thresholds", "expected", "reach")),
        *((name, ctypes.c_void_p) for name in ("least", "most", "kept")),
        *((name, ctypes.c_double) for name in ("smallest_token_prob", "largest_entropy")),
        *((name, ctypes.c_double) for name in ("last_position", "lowest", "highest")),
        ("next_to_nothing", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("needed_width", "width")),
    )

    @classmethod
    def of(cls, rule: DraftRule) -> _DraftRule:
        notes = rule.notes
        arrays = (
            *(rule.weights, rule.history, rule.greedy, rule.exempt, rule.needed, rule.thresholds),
            *(notes.expected, notes.reach, notes.least, notes.most, notes.kept),
        )
        assert all(array.flags.c_contiguous for array in arrays)
        return cls(
            *(array.ctypes.data for array in arrays),
            rule.smallest_token_prob,
            rule.largest_entropy,
            rule.last_position,
            *rule.bounds,
            rule.next_to_nothing,
            rule.needed.shape[1],
            notes.expected.shape[1],
        )


class _DraftCall(ctypes.Structure):
    """``DraftCall`` of ``drafting.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "next", "next_ids", "next_segments")),
        *((name, ctypes.c_void_p) for name in ("requests", "limits", "lengths", "rule")),
        *((name, ctypes.c_void_p) for name in ("uniforms", "tokens", "probs")),
        *((name, ctypes.c_void_p) for name in ("beliefs", "entropy", "token_probs", "broken")),
        *((name, ctypes.c_void_p) for name in ("spare", "order")),
        ("sampling", Sampling),
        *((name, ctypes.c_int64) for name in ("num_rows", "position", "num_positions", "width")),
        *((name, ctypes.c_int64) for name in ("uniforms_width", "vocab")),
    )


class DraftMemory:
    """Where drafts are written, for up to so many requests and tokens.

    Attributes:
        width: tokens of a draft.
        tokens: ``[requests, width]`` int64.
        lengths: ``[requests]`` int64, how many were drafted.
        entropy, token_probs: ``[requests, width]`` float32, if signals were asked for.
        broken: ``[requests, width]`` uint8, 1 where the draft's logits were no numbers.
    """

    def __init__(self, num_requests: int, width: int, vocab_size: int) -> None:
        self.width = width
        self._shape = num_requests, width, vocab_size
        self.tokens = torch.zeros(num_requests, width, dtype=torch.long)
        self.lengths = np.zeros(num_requests, dtype=np.int64)
        self.entropy = torch.zeros(num_requests, width)
        self.token_probs = torch.zeros(num_requests, width)
        self.broken = torch.zeros(num_requests, width, dtype=torch.uint8)
        self._probs: Tensor | None = None
        self._beliefs: Tensor | None = None

    @property
    def probs(self) -> Tensor:
        """``[requests, width + 1, vocab]`` float32, taken when first needed."""
        if self._probs is None:
            requests, width, vocab = self._shape
            self._probs = torch.zeros(requests, width + 1, vocab)
        return self._probs

    @property
    def beliefs(self) -> Tensor:
        """``[requests, width, vocab]`` float32, taken when first needed."""
        if self._beliefs is None:
            self._beliefs = torch.zeros(self._shape)
        return self._beliefs


class DraftRun:
    """One step's drafting.

    Attributes:
        keeps_beliefs: whether what the draft thinks is another thing than what it draws from, and
            so has a memory of its own.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        cache: KVCache,
        memory: DraftMemory,
        controls: LogitControls,
        uniforms: Tensor | None,
        signals: bool,
        vocab_size: int,
        limits: Sequence[int],
        rule: DraftRule | None = None,
    ) -> None:
        """Set up.

        Args:
            decoder: the draft model.
            cache: its cache.
            memory: is written.
            controls: one entry per request, without bias and penalties.
            uniforms: ``[requests, >= width]`` float64; ``None`` if all requests are greedy.
            signals: whether entropies and probabilities of drawn tokens are wanted.
            vocab_size: width of the distributions.
            limits: ``[requests]`` most tokens of each.
            rule: says who stops before, if any; needs the signals.
        """
        self._decoder, self._cache, self._memory = decoder, cache, memory
        self._uniforms = None if uniforms is None else uniforms.contiguous()
        self._controls = controls
        num_threads = torch.get_num_threads()
        self._order = order_memory(controls, num_threads, vocab_size)
        self._spare = torch.empty(num_threads, vocab_size)
        self.keeps_beliefs = signals and (uniforms is None or controls.any_greedy)
        call = _DraftCall()
        call.tokens, call.broken = memory.tokens.data_ptr(), memory.broken.data_ptr()
        if self._uniforms is not None:
            call.uniforms = self._uniforms.data_ptr()
            call.uniforms_width = self._uniforms.shape[1]
            call.probs = memory.probs.data_ptr()
        if self.keeps_beliefs:
            call.beliefs = memory.beliefs.data_ptr()
        if signals:
            call.entropy = memory.entropy.data_ptr()
            call.token_probs = memory.token_probs.data_ptr()
        call.spare = self._spare.data_ptr()
        call.order = None if self._order is None else self._order.data_ptr()
        call.sampling = Sampling.of(controls)
        call.width, call.vocab = memory.width, vocab_size
        self._limits = np.asarray(limits, dtype=np.int64)
        memory.lengths[: len(limits)] = 0
        memory.broken.zero_()
        call.limits, call.lengths = self._limits.ctypes.data, memory.lengths.ctypes.data
        if rule is not None:
            self._rule = rule, _DraftRule.of(rule)
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
            requests: ``[rows]`` index into memory.
            rows: ``[rows]`` of the cache.
            starts: ``[rows]`` position in the text of the token drawn last; before any was drawn,
                of the last token that is read.
        """
        count = len(rows)
        segments = np.empty((count, 4), dtype=np.int64)
        segments[:, 0], segments[:, 1], segments[:, 2] = rows, starts, 1
        segments[:, 3] = np.arange(count)
        ids = self._memory.tokens.numpy()[requests, max(self._call.position - 1, 0)]
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
