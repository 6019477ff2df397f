"""Drafting several tokens in a row without asking the host in between.

A draft model's step is so short that asking the host after every token, whether to go on and with
which token, takes longer than the step. So all steps are queued at once, with the token drawn by
one step read by the next from the device's own memory, and the policy is asked afterwards, position
by position, with the signals that it would have seen. Where it stops the draft is cut: what was
drawn beyond is forgotten, so the outcome is the same as if it had never been drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.types import Draft, DraftSignals
from draftwise.engine.batch import Batch
from draftwise.engine.drawing import draw
from draftwise.engine.follower import Follower
from draftwise.engine.position import LatePosition
from draftwise.models.attention import PackedBatch
from draftwise.models.ragged import RaggedAttention, TokenwiseAttention
from draftwise.models.static_steps import LARGEST_STEP, Decoder, Recording, StaticSteps, step_size
from draftwise.models.transfer import upload
from draftwise.policies.base import Policy

# Tokens drafted before the policy is asked for the first time, and between two times.
_CHUNK = 8
# Columns of what is reported of each drafted token.
_TOKEN, _BROKEN, _ENTROPY, _TOKEN_PROB = range(4)


class _Kind(NamedTuple):
    """What a step computes; each kind has kernels of its own.

    Attributes:
        num_rows: requests, those included that only fill up.
        greedy: all of them are.
        any_greedy: some may be.
        signals: whether the draft's signals are wanted.
        top_k, top_p, min_p: whether somebody uses it.
    """

    num_rows: int
    greedy: bool
    any_greedy: bool
    signals: bool
    top_k: bool
    top_p: bool
    min_p: bool


class _Memory:
    """What the steps of all kinds read and write, on the device."""

    def __init__(self, num_rows: int, width: int, vocab_size: int, follower: Follower) -> None:
        self.width = width
        self.vocab_size = vocab_size
        self.device = device = follower.device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # First slot of the row, position of the last token read, whether it drafts.
        self.places = zeros(3, num_rows, dtype=torch.long)
        self.at = zeros(1, dtype=torch.long)
        self.ids = zeros(num_rows, dtype=torch.long)
        self.logits = zeros(num_rows, vocab_size, dtype=follower.model.dtype)
        self.uniforms = zeros(num_rows, width, dtype=torch.float64)
        self.temperature = zeros(num_rows)
        self.top_k = zeros(num_rows, dtype=torch.long)
        self.top_p, self.min_p = zeros(num_rows), zeros(num_rows)
        self.tokens = zeros(num_rows, width, dtype=torch.long)
        self.report = zeros(num_rows, width, 4)
        self._probs: Tensor | None = None
        self._beliefs: Tensor | None = None

    @property
    def probs(self) -> Tensor:
        """``[rows, width + 1, vocab]``, taken when first needed."""
        if self._probs is None:
            shape = len(self.ids), self.width + 1, self.vocab_size
            self._probs = torch.zeros(shape, device=self.device)
        return self._probs

    @property
    def beliefs(self) -> Tensor:
        """``[rows, width, vocab]``, taken when first needed."""
        if self._beliefs is None:
            shape = len(self.ids), self.width, self.vocab_size
            self._beliefs = torch.zeros(shape, device=self.device)
        return self._beliefs

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


class DraftChain:
    """Drafts on fixed memory, all requests of a batch at once."""

    def __init__(self, follower: Follower) -> None:
        """Take a draft model; memory is taken when it first drafts."""
        self._follower = follower
        self._memory: _Memory | None = None
        self._recordings: dict[tuple[_Kind, bool, int], Recording] = {}
        self._controls: LogitControls | None = None
        self._records = False

    def serves(self, batch: Batch, active: Sequence[int]) -> bool:
        """Whether this step, in which some requests draft, can be drafted so."""
        return (
            self._follower.has_static_steps(step_size(len(batch.generating)))
            if len(batch.generating) <= LARGEST_STEP and batch.controls.bias is None
            else False
        ) and not (batch.controls.uses_history or batch.any_is_masked(active))

    @torch.inference_mode()
    def draft(
        self, batch: Batch, policy: Policy, limits: list[int], active: list[int], logits: Tensor
    ) -> Draft:
        """Draft as far as the policy wants.

        Args:
            batch: the step.
            policy: is asked after the fact.
            limits: ``[batch]`` most tokens of each request.
            active: requests with a limit above 0.
            logits: ``[active, vocab]`` for their first tokens.

        Returns:
            A draft whose distributions are in memory that the next one overwrites.
        """
        kind, memory = self._prepare(batch, policy, limits, active, logits)
        num_requests, most = len(limits), max(limits)
        lengths = [0] * num_requests
        drafting, num_tokens, num_asked = list(active), 0, 0
        while drafting:
            start, end = num_tokens, min(most, num_tokens + _CHUNK)
            self._advance(kind, start == 0, end - start)
            num_tokens = end
            report = memory.report[:num_requests, start:end].cpu()
            for index in range(start, end):
                here = report[drafting, index - start]
                beliefs = self._believed(kind)[:num_requests, index] if kind.signals else None
                drafting = _ask(policy, index, drafting, here, beliefs, lengths, limits)
                num_asked = index + 1
                if not drafting:
                    break
        self._count(batch, active, lengths, num_tokens)
        return self._collect(batch, kind, lengths, num_asked)

    def _prepare(
        self, batch: Batch, policy: Policy, limits: list[int], active: list[int], logits: Tensor
    ) -> tuple[_Kind, _Memory]:
        """Put everything the steps read where they read it."""
        controls, uniforms = batch.controls, batch.uniforms
        num_requests = len(limits)
        memory = self._memory_for(
            max(limits) if uniforms is None else max(max(limits), uniforms.draft.shape[1])
        )
        device, capacity = memory.device, self._follower.capacity
        kind = _Kind(
            step_size(num_requests),
            uniforms is None,
            controls.any_greedy,
            policy.uses_draft_signals(),
            controls.top_k is not None,
            controls.top_p is not None,
            controls.min_p is not None,
        )
        places = np.zeros((3, kind.num_rows), dtype=np.int64)
        for index, request in enumerate(batch.generating):
            live = limits[index] > 0
            places[:, index] = request.row * capacity, len(request.tokens) - 1, live
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
            # Rows that only fill up are sampled from like the others.
            memory.temperature[num_requests : kind.num_rows].fill_(1.0)
            memory.top_k[num_requests : kind.num_rows].fill_(1)
            self._controls = controls
        if len(active) == num_requests:
            memory.logits[:num_requests].copy_(logits)
        else:
            memory.logits.index_copy_(0, upload(active, torch.long, device), logits)
        return kind, memory

    def _memory_for(self, width: int) -> _Memory:
        memory = self._memory
        records = self._follower.static_steps()[1].records
        if memory is None or memory.width < width or self._records != records:
            follower = self._follower
            num_rows = step_size(min(follower.num_rows, LARGEST_STEP))
            self._memory = memory = _Memory(num_rows, width, follower.vocab_size, follower)
            self._recordings = {}
            self._controls = None
            self._records = records
        return memory

    def _advance(self, kind: _Kind, is_first: bool, num_tokens: int) -> None:
        """Draw tokens for everybody, each after reading the one before."""
        decoder, steps = self._follower.static_steps()

        def work() -> None:
            for index in range(num_tokens):
                if index or not is_first:
                    self._read(decoder, steps, kind.num_rows)
                self._draw(kind)

        recording = self._recordings.setdefault((kind, is_first, num_tokens), Recording())
        recording.run(work, steps.pool)

    def _read(self, decoder: Decoder, steps: StaticSteps, num_rows: int) -> None:
        """Logits after the token drawn last."""
        memory, cache = self._memory, self._follower.cache
        assert memory is not None
        memory.at.add_(1)
        memory.places[1, :num_rows].add_(1)
        first, position, live = memory.places[:, :num_rows]
        inside = (live > 0) & (position < cache.capacity)
        first = torch.where(inside, first, cache.spare_slot)
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
        # The spare slot is one only: whoever is not inside is at position 0 of it.
        packed = PackedBatch(cache, position, first + position, [], attention)
        hidden = decoder.hidden(memory.ids[:num_rows], packed)[:num_rows]
        memory.logits[:num_rows].copy_(self._follower.fit_vocabulary(decoder.logits(hidden)))

    def _draw(self, kind: _Kind) -> None:
        memory, rows = self._memory, kind.num_rows
        assert memory is not None
        at, controls = memory.at, memory.controls(kind)
        uniforms = None if kind.greedy else memory.uniforms[:rows].index_select(1, at).squeeze(1)
        tokens, broken, q, beliefs = draw(
            memory.logits[:rows], controls, None, uniforms, kind.signals
        )
        tokens = torch.where(broken, 0, tokens)
        memory.ids[:rows].copy_(tokens)
        memory.tokens[:rows].index_copy_(1, at, tokens.unsqueeze(1))
        if q is not None:
            q = torch.where(broken.unsqueeze(1), 0.0, q)
            memory.probs[:rows].index_copy_(1, at, q.unsqueeze(1))
        nothing = torch.zeros_like(tokens, dtype=torch.float32)
        uncertainty = confidence = nothing
        if beliefs is not None:
            beliefs = beliefs.nan_to_num(nan=0.0)
            uncertainty, confidence = entropy(beliefs), token_probabilities(beliefs, tokens)
            if _keeps_beliefs(kind):
                memory.beliefs[:rows].index_copy_(1, at, beliefs.unsqueeze(1))
        told = torch.stack([tokens.float(), broken.float(), uncertainty, confidence], dim=1)
        memory.report[:rows].index_copy_(1, at, told.unsqueeze(1))

    def _believed(self, kind: _Kind) -> Tensor:
        """``[rows, width or more, vocab]`` beliefs; q itself where they are the same."""
        assert self._memory is not None
        return self._memory.beliefs if _keeps_beliefs(kind) else self._memory.probs

    def _count(self, batch: Batch, active: list[int], lengths: list[int], num_tokens: int) -> None:
        """Tell the cache what was read: all but the last token drawn, of what is kept."""
        cache = self._follower.cache
        for index in active:
            request = batch.generating[index]
            start = len(request.tokens)
            cache.advance(request.row, min(start + num_tokens - 1, cache.capacity))
            cache.truncate(request.row, start + min(lengths[index], num_tokens - 1))

    def _collect(self, batch: Batch, kind: _Kind, lengths: list[int], num_tokens: int) -> Draft:
        memory = self._memory
        assert memory is not None
        count = len(lengths)
        tokens = memory.tokens[:count, :num_tokens].clone()
        probs = None if kind.greedy else memory.probs[:count, : num_tokens + 1]
        signals: DraftSignals | None = None
        if kind.signals:
            report = memory.report[:count, :num_tokens]
            signals = DraftSignals(
                self._believed(kind)[:count, :num_tokens],
                report[:, :, _ENTROPY].clone(),
                report[:, :, _TOKEN_PROB].clone(),
            )
        if min(lengths) == num_tokens:
            if probs is not None:
                probs[:, num_tokens].zero_()
        else:
            extents = upload(lengths, torch.long, memory.device).unsqueeze(1)
            beyond = torch.arange(num_tokens + 1, device=memory.device) >= extents
            if probs is not None:
                probs.masked_fill_(beyond.unsqueeze(2), 0.0)
            beyond = beyond[:, :num_tokens]
            tokens.masked_fill_(beyond, 0)
            if signals is not None:
                signals.entropy.masked_fill_(beyond, 0.0)
                signals.token_probs.masked_fill_(beyond, 0.0)
                if _keeps_beliefs(kind):
                    signals.beliefs.masked_fill_(beyond.unsqueeze(2), 0.0)
        return Draft(
            tokens,
            tuple(lengths),
            probs,
            tuple(range(-1, num_tokens - 1)),
            signals,
            None if batch.uniforms is None else batch.uniforms.stage,
        )


def _keeps_beliefs(kind: _Kind) -> bool:
    """Whether the beliefs are something else than q."""
    return kind.signals and (kind.greedy or kind.any_greedy)


def _ask(
    policy: Policy,
    index: int,
    drafting: list[int],
    report: Tensor,
    beliefs: Tensor | None,
    lengths: list[int],
    limits: list[int],
) -> list[int]:
    """Count the token of a position; who goes on after it."""
    told = beliefs is not None
    position = LatePosition(
        index,
        drafting,
        report[:, _TOKEN].long(),
        report[:, _ENTROPY] if told else None,
        report[:, _TOKEN_PROB] if told else None,
        beliefs,
    )
    whole = (report[:, _BROKEN] == 0).tolist()
    for request, is_whole in zip(drafting, whole, strict=True):
        lengths[request] += is_whole
    wanted = policy.keep_drafting(position)
    going = [True] * len(drafting) if wanted is None else wanted.tolist()
    return [
        request
        for request, is_whole, goes in zip(drafting, whole, going, strict=True)
        if goes and is_whole and limits[request] > index + 1
    ]
