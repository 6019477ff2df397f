"""An assistant of Gemma 4, which reads the target's own cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.engine.cached_model import CachedModel, ForwardInput
from draftwise.engine.lifecycle import Commit
from draftwise.engine.request import Request
from draftwise.models.heads.assistant import AssistantModel, Span
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import upload


class _NewestState(NamedTuple):
    """The target's state at the last position that it has read and kept.

    Attributes:
        position: the position.
        row: ``[hidden]``.
    """

    position: int
    row: Tensor


class _Drafts:
    """The drafts of a step.

    Attributes:
        carried: ``[rows, hidden]`` what the newest pass has carried to the next one.
        places: the row of each cache slot.
        spans: what the target has stored of the text in each cache slot.
        positions: position of the newest token of the text in each cache slot.
    """

    def __init__(self, spans: dict[int, Span], positions: dict[int, int]) -> None:
        self.spans, self.positions = spans, positions
        self.carried: Tensor | None = None
        self.places: dict[int, int] = {}


class CachedAssistant(CachedModel):
    """Runs an assistant on the target's cache, of which it changes nothing.

    It has no keys and values. Of a request it keeps the target's state at the last position that
    was committed. The target has computed all else that it reads, so it never lags.

    Attributes:
        assistant: the assistant.
    """

    def __init__(self, model: AssistantModel, target_cache: KVCache, vocab_size: int) -> None:
        """Set up."""
        super().__init__(model, target_cache, vocab_size)
        self.assistant = model
        self.state_layers = model.state_layers
        self._states: list[_NewestState | None] = [None] * self.num_rows
        self._drafts: _Drafts | None = None

    def num_behind(self, request: Request) -> int:
        """0: the target has read all tokens but the newest."""
        return 0

    def room(self, request: Request) -> int:
        """Maximum number of tokens that it can draft; 0 where the newest state was lost."""
        state = self._states[request.cache_slot]
        is_known = state is not None and state.position == len(request.tokens) - 2
        return super().room(request) if is_known else 0

    def admit(self, request: Request) -> None:
        """Forget the state of the cache slot's last request."""
        self._states[request.cache_slot] = None

    def commit(self, commit: Commit) -> None:
        """Keep the newest states. The target's cache was rolled back already."""
        for request, states in zip(commit.requests, commit.states, strict=True):
            if states is not None and states.length:
                last = states.start + states.length - 1
                self._states[request.cache_slot] = _NewestState(last, states.rows[-1].clone())

    def recover(self, requests: Iterable[Request]) -> None:
        """Nothing: what a step drafts is not kept."""

    def assume_read(self, cache_slot: int, length: int) -> None:
        """Prepare a measurement: the target has read one more token than ``length``."""
        self.cache.assume(cache_slot, length + 1)
        row = torch.zeros(self.assistant.state_size, dtype=self.model.dtype, device=self.device)
        self._states[cache_slot] = _NewestState(length, row)

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Read the newest token of each request that drafts; see :meth:`CachedModel.read`."""
        requests = sorted(
            (each.request for each in inputs if each.num_logits), key=lambda one: one.cache_slot
        )
        if not requests:
            return None, 0
        spans, positions, features = {}, {}, []
        for request in requests:
            slot, length = request.cache_slot, len(request.tokens) - 1
            state = self._states[slot]
            assert state is not None
            assert state.position == length - 1
            spans[slot] = self.assistant.span(self.cache, slot, length)
            positions[slot] = length
            features.append(state.row)
        self._drafts = _Drafts(spans, positions)
        tokens = upload([each.tokens[-1] for each in requests], torch.long, self.device)
        logits = self._read([*spans], tokens, self.assistant.features(torch.stack(features)))
        return logits, len(requests)

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read the token drafted last per cache slot; returns ``[rows, vocab]`` logits."""
        before = self._drafts
        assert before is not None
        assert before.carried is not None
        places = upload([before.places[slot] for slot in rows], torch.long, self.device)
        return self._read(rows, tokens, before.carried[places])

    def has_static_steps(self, num_tokens: int) -> bool:
        """False: the passes are not recorded."""
        return False

    def _read(self, slots: Sequence[int], tokens: Tensor, features: Tensor) -> Tensor:
        drafts = self._drafts
        assert drafts is not None
        positions = upload([drafts.positions[slot] for slot in slots], torch.long, self.device)
        spans = [drafts.spans[slot] for slot in slots]
        output = self.assistant.read(tokens, features, positions, spans)
        drafts.carried = output.carried
        drafts.places = {slot: at for at, slot in enumerate(slots)}
        return self.fit_vocabulary(output.logits)
