"""Drafting several tokens in a row without synchronising with the host.

A step of a draft model takes less time than a round trip to the host. So several steps are queued
at once. Each step reads the token that the previous step drew from device memory. The policy is
asked after the last of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.types import Draft
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.drafting.sampling import draw
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.memory import upload
from draftwise.models.packing import PackedBatch
from draftwise.models.ragged import RaggedAttention, TokenwiseAttention
from draftwise.models.static_steps import LARGEST_STEP, Recording, StaticSteps, step_size
from draftwise.policies.inputs import DraftPosition, LazyPosition

# Tokens drawn between two copies to the host.
_CHUNK = 8
# Columns of the record of each drafted token.
_TOKEN, _IS_NAN, _ENTROPY, _TOKEN_PROB = range(4)


class _Kind(NamedTuple):
    """What a step computes. A graph is recorded for each kind.

    Attributes:
        num_rows: number of rows, padding included.
        greedy: whether all requests are greedy.
        any_greedy: whether some requests may be greedy.
        signals: whether the draft's signals are computed.
        top_k, top_p, min_p: whether any request uses the parameter.
    """

    num_rows: int
    greedy: bool
    any_greedy: bool
    signals: bool
    top_k: bool
    top_p: bool
    min_p: bool


class _Memory:
    """Device memory that steps of all kinds read and write."""

    def __init__(self, num_rows: int, width: int, model: CachedModel) -> None:
        self.width = width
        self.device = device = model.device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Per row: first entry in the cache, position of the last token read, whether it drafts.
        self.places = zeros(3, num_rows, dtype=torch.long)
        self.at = zeros(1, dtype=torch.long)
        self.ids = zeros(num_rows, dtype=torch.long)
        self.logits = zeros(num_rows, model.vocab_size, dtype=model.model.dtype)
        self.uniforms = zeros(num_rows, width, dtype=torch.float64)
        self.temperature = zeros(num_rows)
        self.top_k = zeros(num_rows, dtype=torch.long)
        self.top_p, self.min_p = zeros(num_rows), zeros(num_rows)
        self.report = zeros(num_rows, width, 4)
        self.carried: Tensor | None = None
        if model.carried_size:
            self.carried = zeros(num_rows, model.carried_size, dtype=model.model.dtype)
        self.buffers = DraftBuffers(num_rows, width, model.vocab_size, device)

    def controls(self, kind: _Kind) -> LogitControls:
        """Sampling parameters of the first rows."""
        rows = kind.num_rows
        return LogitControls(
            self.temperature[:rows],
            kind.greedy,
            kind.any_greedy,
            self.top_k[:rows] if kind.top_k else None,
            self.top_p[:rows] if kind.top_p else None,
            self.min_p[:rows] if kind.min_p else None,
        )


class RecordedBackend:
    """Draws tokens in fixed memory, for all requests of a batch at once."""

    def __init__(self, cached_model: CachedModel) -> None:
        """Set up for a draft model. Memory is allocated by the first draft."""
        self._cached_model = cached_model
        self._memory: _Memory | None = None
        self._recordings: dict[tuple[_Kind, bool, int], Recording] = {}
        self._controls: LogitControls | None = None
        self._records = False

    def serves(self, step: DraftingStep) -> bool:
        """Whether the model has static steps of this size and the logits need no processing."""
        num_requests = len(step.limits)
        return (
            step.is_plain
            and num_requests <= LARGEST_STEP
            and self._cached_model.has_static_steps(step_size(num_requests))
        )

    @torch.inference_mode()
    def begin(self, step: DraftingStep) -> None:
        """Read new tokens and copy the inputs of the steps to the fixed memory."""
        self._step = step
        self._num_tokens = 0
        logits, _ = self._cached_model.read(step.inputs)
        assert logits is not None
        controls, uniforms = step.batch.controls, step.batch.uniforms
        num_requests, width = len(step.limits), step.width
        memory = self._memory_for(
            width if uniforms is None else max(width, uniforms.draft.shape[1])
        )
        device, capacity = memory.device, self._cached_model.capacity
        kind = self._kind = _Kind(
            step_size(num_requests),
            uniforms is None,
            controls.any_greedy,
            step.signals,
            controls.top_k is not None,
            controls.top_p is not None,
            controls.min_p is not None,
        )
        places = np.zeros((3, kind.num_rows), dtype=np.int64)
        for index, limit in enumerate(step.limits):
            first = step.cache_slots[index] * capacity
            places[:, index] = first, self._text_end(index) - 1, limit > 0
        memory.places[:, : kind.num_rows].copy_(
            upload(torch.from_numpy(places), torch.long, device), non_blocking=True
        )
        memory.at.zero_()
        if uniforms is not None:
            drawing = upload(uniforms.draft, torch.float64, device)
            memory.uniforms[:num_requests, : drawing.shape[1]].copy_(drawing)
        if controls is not self._controls:
            for name in ("temperature", "top_k", "top_p", "min_p"):
                value = getattr(controls, name)
                if value is not None:
                    getattr(memory, name)[:num_requests].copy_(value)
            # Padding rows are sampled like the others.
            memory.temperature[num_requests : kind.num_rows].fill_(1.0)
            memory.top_k[num_requests : kind.num_rows].fill_(1)
            self._controls = controls
        found = [(memory.logits, logits)]
        carried = self._cached_model.first_carried()
        if memory.carried is not None and carried is not None:
            found.append((memory.carried, carried))
        drafting = None
        if len(step.active) < num_requests:
            drafting = upload(step.active, torch.long, device)
        for kept, rows in found:
            if drafting is None:
                kept[:num_requests].copy_(rows)
            else:
                kept.index_copy_(0, drafting, rows)

    @torch.inference_mode()
    def draw(self, active: list[int], num_tokens: int) -> int:
        """Draw several tokens for every request without synchronising with the host."""
        memory = self._memory
        assert memory is not None
        start, end = self._num_tokens, min(self._step.longest, self._num_tokens + _CHUNK)
        self._advance(self._kind, start == 0, end - start)
        self._num_tokens = end
        self._first = start
        self._report = memory.report[: len(self._step.limits), start:end].cpu()
        return end

    def decided_lengths(self) -> dict[int, int]:
        """None: this backend does not decide lengths."""
        return {}

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """A position with its scalars on the host. Distributions are fetched on first access."""
        memory = self._memory
        assert memory is not None
        report = self._report[active, index - self._first]
        is_nan: list[bool] = (report[:, _IS_NAN] != 0).tolist()
        tokens = report[:, _TOKEN].long()
        if not self._kind.signals:
            return DraftPosition(index, active, tokens, None, None, None), is_nan
        wide = memory.buffers.draft_probs if self._step.own_draft_probs else memory.buffers.probs
        position = LazyPosition(
            index, active, tokens, wide[:, index], report[:, _ENTROPY], report[:, _TOKEN_PROB]
        )
        return position, is_nan

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """Set the cache lengths to the kept tokens that were read; the last drawn one was not."""
        step, memory, cache = self._step, self._memory, self._cached_model.cache
        assert memory is not None
        for index in step.active:
            slot, start = step.cache_slots[index], self._text_end(index)
            cache.advance(slot, min(start + self._num_tokens - 1, cache.capacity))
            cache.truncate(slot, start + min(lengths[index], self._num_tokens - 1))
        if step.signals:
            count = len(lengths)
            report = memory.report[:count, :num_tokens]
            memory.buffers.entropy[:count, :num_tokens] = report[:, :, _ENTROPY]
            memory.buffers.token_probs[:count, :num_tokens] = report[:, :, _TOKEN_PROB]
        return step.collect(memory.buffers, lengths, num_tokens)

    def _text_end(self, index: int) -> int:
        """Number of entries in the cache after a request's text."""
        request = self._step.batch.generating[index]
        return self._cached_model.text_end(request, len(request.tokens))

    def _memory_for(self, width: int) -> _Memory:
        memory = self._memory
        records = self._cached_model.static_steps().records
        if memory is None or memory.width < width or self._records != records:
            num_rows = step_size(min(self._cached_model.num_rows, LARGEST_STEP))
            self._memory = memory = _Memory(num_rows, width, self._cached_model)
            self._recordings = {}
            self._controls = None
            self._records = records
        return memory

    def _advance(self, kind: _Kind, is_first: bool, num_tokens: int) -> None:
        """Draw tokens for every row, each after reading the previous one."""
        steps = self._cached_model.static_steps()

        def work() -> None:
            for index in range(num_tokens):
                if index or not is_first:
                    self._read(steps, kind.num_rows)
                self._draw(kind)

        recording = self._recordings.setdefault((kind, is_first, num_tokens), Recording())
        recording.run(work, steps.pool)

    def _read(self, steps: StaticSteps, num_rows: int) -> None:
        """Logits after the most recently drawn token."""
        memory, cache = self._memory, self._cached_model.cache
        assert memory is not None
        memory.at.add_(1)
        memory.places[1, :num_rows].add_(1)
        first, position, live = memory.places[:, :num_rows]
        inside = (live > 0) & (position < cache.capacity)
        first = torch.where(inside, first, cache.spare_token_slot)
        position = torch.where(inside, position, 0)
        attention: RaggedAttention
        if steps.kernels.any:
            attention = steps.kernels.attention(
                torch.arange(num_rows + 1, dtype=torch.int32, device=memory.device),
                torch.nn.functional.pad(first, (0, 1)).int(),
                (position + 1).int(),
                1,
                cache.capacity,
            )
        else:
            attention = TokenwiseAttention(first, position + 1, cache.capacity)
        # There is one spare entry. Rows that do not draft or have a full slot write to it.
        packed = PackedBatch(cache, position, first + position, [], attention)
        carried = None if memory.carried is None else memory.carried[:num_rows]
        logits = self._cached_model.read_next(memory.ids[:num_rows], packed, carried)
        memory.logits[:num_rows].copy_(logits)

    def _draw(self, kind: _Kind) -> None:
        memory, rows = self._memory, kind.num_rows
        assert memory is not None
        at, controls, buffers = memory.at, memory.controls(kind), memory.buffers
        uniforms = None if kind.greedy else memory.uniforms[:rows].index_select(1, at).squeeze(1)
        tokens, is_nan, q, draft_probs = draw(
            memory.logits[:rows], controls, None, uniforms, kind.signals
        )
        tokens = torch.where(is_nan, 0, tokens)
        memory.ids[:rows].copy_(tokens)
        buffers.tokens[:rows].index_copy_(1, at, tokens.unsqueeze(1))
        if q is not None:
            q = torch.where(is_nan.unsqueeze(1), 0.0, q)
            buffers.probs[:rows].index_copy_(1, at, q.unsqueeze(1))
        nothing = torch.zeros_like(tokens, dtype=torch.float32)
        uncertainty = confidence = nothing
        if draft_probs is not None:
            draft_probs = draft_probs.nan_to_num(nan=0.0)
            uncertainty = entropy(draft_probs)
            confidence = token_probabilities(draft_probs, tokens)
            if kind.greedy or kind.any_greedy:
                buffers.draft_probs[:rows].index_copy_(1, at, draft_probs.unsqueeze(1))
        report = torch.stack([tokens.float(), is_nan.float(), uncertainty, confidence], dim=1)
        memory.report[:rows].index_copy_(1, at, report.unsqueeze(1))
