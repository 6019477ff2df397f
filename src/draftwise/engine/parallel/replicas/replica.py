"""A replica: a process with a draft and an optional companion for a share of every batch.

It is started as ``python -m draftwise.engine.parallel.replicas.replica DESCRIPTOR``, where
``DESCRIPTOR`` is the file descriptor of the inherited socket that is connected to the engine.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import Draft
from draftwise.engine.batch import Batch, PromptChunk
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.companion import CompanionModel
from draftwise.engine.parallel.replicas.messages import (
    Answer,
    Channel,
    ChannelClosedError,
    DraftShare,
    ReplicaSpec,
    TextChange,
)
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.model import ModelProposer
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError
from draftwise.models.draft_buffers import clear_beyond
from draftwise.models.loading import LoadedModel
from draftwise.params import SamplingParams
from draftwise.policies.base import DraftPlan, Policy
from draftwise.policies.inputs import RequestState
from draftwise.processes import end_quickly, end_with_parent
from draftwise.speculation import RequestSpeculation

Moved = TypeVar("Moved", LogitControls, TokenHistory)


class PrecomputedPolicy(Policy):
    """Drafts to given lengths. The engine has already made its decisions."""

    name = "precomputed"
    summary = "drafts to lengths that the engine decided"
    source = "this project"

    def __init__(self, limits: Sequence[int], signals: bool) -> None:
        """Set up.

        Args:
            limits: ``[batch]`` maximum draft length of each request.
            signals: whether the draft's signals are computed.
        """
        self.num_speculative_tokens = max(limits, default=0)
        self._limits = list(limits)
        self._signals = signals

    @property
    def uses_draft_signals(self) -> bool:
        """Whether the engine requested signals."""
        return self._signals

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The given lengths."""
        return DraftPlan(self._limits)


class Replica:
    """Keeps the texts of its cache slots, and drafts and scores like the engine itself."""

    def __init__(self, draft: CachedModel, companion: CachedModel | None) -> None:
        """Set up.

        Args:
            draft: the draft model with its cache.
            companion: the companion model with its cache; ``None`` without a companion.
        """
        self._draft, self._companion = draft, companion
        self._drafter = ModelProposer(
            ProposerContext(draft.vocab_size, draft.device, draft.num_rows, draft.capacity, draft)
        )
        self._scorer = (
            None if companion is None else CompanionModel(companion, companion.vocab_size)
        )
        self._requests: dict[int, Request] = {}
        self._step: tuple[Batch, Draft] | None = None

    @torch.inference_mode()
    def draft(self, share: DraftShare) -> Answer:
        """Draft for this replica's share of a step."""
        for change in share.texts:
            self._change(change)
        history = share.token_history
        if history is not None:
            history = _moved(history, self._draft.device)
        batch = Batch(
            chunks=[
                PromptChunk(self._requests[slot], start, end) for slot, start, end in share.chunks
            ],
            generating=[self._requests[slot] for slot in share.cache_slots],
            can_draft=[limit > 0 for limit in share.limits],
            controls=_moved(share.controls, self._draft.device),
            token_history=history,
            uniforms=share.uniforms,
            lenience=[1.0] * len(share.cache_slots),
        )
        policy = PrecomputedPolicy(share.limits, share.signals)
        draft = self._drafter.draft(batch, policy, share.limits)
        self._step = batch, draft
        slots = {*share.cache_slots, *(slot for slot, _, _ in share.chunks)}
        return Answer(
            replace(draft, stage_uniforms=None),
            {slot: self._draft.cache.lengths[slot] for slot in slots},
        )

    @torch.inference_mode()
    def score(self, lengths: tuple[int, ...]) -> Answer:
        """Score the kept tokens of the last draft.

        Args:
            lengths: ``[requests]`` number of draft tokens to score; all 0 to read prompts only.
        """
        assert self._scorer is not None
        assert self._companion is not None
        assert self._step is not None
        batch, draft = self._step
        scores = None
        if any(lengths):
            scores = self._scorer.score(batch, _cut(draft, lengths))
        else:
            self._scorer.read_prompts(batch)
        requests = [*batch.generating, *(chunk.request for chunk in batch.chunks)]
        cached = self._companion.cache.lengths
        return Answer(scores, {each.cache_slot: cached[each.cache_slot] for each in requests})

    def _change(self, change: TextChange) -> None:
        caches = [(self._draft, change.draft_length)]
        if self._companion is not None:
            caches.append((self._companion, change.companion_length))
        if change.is_new:
            self._requests[change.cache_slot] = _text(change.cache_slot)
            for cached_model, _ in caches:
                cached_model.cache.clear(change.cache_slot)
        for cached_model, length in caches:
            cached_model.cache.truncate(change.cache_slot, length)
        self._requests[change.cache_slot].tokens.extend(change.tail)


def _cut(draft: Draft, lengths: tuple[int, ...]) -> Draft:
    """Truncate a draft to the given lengths. Its memory beyond them is set to zero."""
    signals = [] if draft.signals is None else draft.signals.tensors
    probs = [] if draft.probs is None else [draft.probs]
    clear_beyond(lengths, draft.tokens, *probs, *signals)
    return replace(draft, lengths=lengths)


def _moved(tensors: Moved, device: torch.device) -> Moved:
    """A copy whose tensors are on a device."""
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in vars(tensors).items() if isinstance(value, Tensor)
    }
    return replace(tensors, **moved)


def _text(row: int) -> Request:
    """A request that only holds a text. The engine decides its limits."""
    params = SamplingParams(max_tokens=2**31)
    request = Request(row, None, [], params, None, frozenset(), 2**31, RequestSpeculation())
    request.cache_slot = row
    return request


def serve(channel: Channel) -> None:
    """Load the models that the engine names. Then draft and score until it closes the channel."""
    spec: ReplicaSpec = channel.receive()
    torch.set_num_threads(spec.num_threads)
    try:
        device = torch.device(spec.device)
        draft = spec.draft.load(device)
        companion = None if spec.companion is None else spec.companion.load(device)
        replica = Replica(
            _cached_model(draft, spec),
            None if companion is None else _cached_model(companion, spec),
        )
    except DraftwiseError as error:
        channel.send(error)
        return
    channel.send([each.fingerprint for each in (draft, companion) if each is not None])
    while True:
        message = channel.receive()
        drafts = isinstance(message, DraftShare)
        channel.send(replica.draft(message) if drafts else replica.score(message))


def _cached_model(loaded: LoadedModel, spec: ReplicaSpec) -> CachedModel:
    model = loaded.model
    cache = model.new_cache(spec.num_cache_slots, loaded.max_model_len)
    return CachedModel(model, cache, spec.vocab_size)


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal, but the engine decides when its replicas end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    end_quickly()
    try:
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    except ChannelClosedError:
        sys.exit(0)
