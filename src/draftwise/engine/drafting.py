"""Draft sources: who writes ahead. A model, or nobody."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftwise.core.rejection import sample
from draftwise.core.sampling import TokenHistory, greedy_tokens, probabilities
from draftwise.core.types import Draft
from draftwise.engine.scheduler import Batch
from draftwise.models.attention import Segment
from draftwise.models.kv_cache import KVCache
from draftwise.models.packed_model import PackedModel
from draftwise.policies.base import DraftPosition, Policy


class DraftSource(Protocol):
    """Proposes a continuation for each generating request of a step."""

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as far as the policy wants."""


class NoDraft:
    """Drafts nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """An empty draft for everybody."""
        num_requests = len(batch.generating)
        tokens = torch.zeros(num_requests, 0, dtype=torch.long, device=self._device)
        return Draft(tokens, (0,) * num_requests, None, ())


class ModelDraft:
    """A draft model that writes token by token, all requests of the batch at once.

    It keeps its own cache and follows the target's prompt chunk by chunk, without computing
    logits for prompts.
    """

    def __init__(self, model: PackedModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the draft model.
            cache: its cache, with the target's rows.
            vocab_size: the target's; the draft's logits are cut or filled to this width.
        """
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as far as the policy wants, at most to each request's limit."""
        limits = self._limits(batch, policy)
        active = [index for index, limit in enumerate(limits) if limit > 0]
        logits = self._catch_up(batch, active)
        if logits is None:
            return NoDraft(self._model.device).propose(batch, policy)
        writer = _DraftWriter(batch, max(limits), self._vocab_size, self._model.device)
        while True:
            index = writer.num_tokens
            q, drawn = writer.write(active, self._fit_vocabulary(logits))
            position = DraftPosition(
                index, torch.tensor(active, device=self._model.device), drawn, q, logits
            )
            wanted = policy.keep_drafting(position)
            going = [True] * len(active) if wanted is None else wanted.tolist()
            stays = [
                at
                for at, request in enumerate(active)
                if going[at] and limits[request] > index + 1 and writer.lengths[request] > index
            ]
            if not stays:
                return writer.draft()
            active = [active[at] for at in stays]
            if len(stays) < len(drawn):
                drawn = drawn[torch.tensor(stays, device=drawn.device)]
            logits = self._forward_one(batch, active, drawn)

    def _limits(self, batch: Batch, policy: Policy) -> list[int]:
        states = [
            request.state(request.draft_limit(self._cache.capacity) if can_draft else 0)
            for request, can_draft in zip(batch.generating, batch.can_draft, strict=True)
        ]
        lengths = policy.draft_lengths(states)
        return [min(n, state.draft_limit) for n, state in zip(lengths, states, strict=True)]

    def _catch_up(self, batch: Batch, active: list[int]) -> Tensor | None:
        """Process what the draft has not seen; logits of the active requests' last tokens."""
        pending = [(chunk.request, chunk.end, False) for chunk in batch.chunks]
        pending += [(batch.generating[i], len(batch.generating[i].tokens), True) for i in active]
        pending.sort(key=lambda item: item[0].row)
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for request, end, drafts in pending:
            start = self._cache.lengths[request.row]
            end = min(end, self._cache.capacity)
            if end > start:
                tokens.extend(self._readable(request.tokens[start:end]))
                segments.append(Segment(request.row, start, end - start))
            if drafts:
                rows.append(len(tokens) - 1)
        if not segments:
            return None
        return self._model.forward(self._cache, tokens, segments, rows or None)

    def _readable(self, tokens: list[int]) -> list[int]:
        """Tokens for the draft: one that only the target's wider embedding has becomes token 0."""
        size = self._model.vocab_size
        if size >= self._vocab_size:
            return tokens
        return [token if token < size else 0 for token in tokens]

    def _forward_one(self, batch: Batch, active: list[int], tokens: Tensor) -> Tensor:
        rows = [batch.generating[index].row for index in active]
        segments = [Segment(row, self._cache.lengths[row], 1) for row in rows]
        logits = self._model.forward(self._cache, tokens, segments, range(len(rows)))
        assert logits is not None
        return logits

    def _fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Give logits the target's width: padding entries are never drafted."""
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


class _DraftWriter:
    """Collects a batch's draft position by position."""

    def __init__(self, batch: Batch, width: int, vocab_size: int, device: torch.device) -> None:
        num_requests = len(batch.generating)
        self._batch = batch
        self._history: TokenHistory | None = batch.history
        self._tokens = torch.zeros(num_requests, width, dtype=torch.long, device=device)
        self._probs: Tensor | None = None
        if batch.uniforms is not None:
            self._probs = torch.zeros(num_requests, width + 1, vocab_size, device=device)
            self._uniforms = batch.uniforms.draft.to(device)
        self.lengths = [0] * num_requests
        self.num_tokens = 0

    def write(self, active: list[int], logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """Draw the next token of the active requests: q ``[active, vocab]`` and the tokens."""
        index = torch.tensor(active, device=logits.device)
        everybody = len(active) == len(self.lengths)
        controls = self._batch.controls if everybody else self._batch.controls.rows(index)
        history = self._history if self._history is None else self._history.rows(index)
        q: Tensor | None = None
        written = [True] * len(active)
        if self._probs is None:
            drawn = greedy_tokens(logits, controls, history)
        else:
            q = probabilities(logits, controls, history)
            drawn = sample(q, self._uniforms[index, self.num_tokens])
            broken = q[:, 0].isnan()
            if bool(broken.any()):
                # A draft that is not a number proposes nothing from here on.
                q = torch.where(broken.unsqueeze(1), 0.0, q)
                written = (~broken).tolist()
            self._probs[index, self.num_tokens] = q
        self._tokens[index, self.num_tokens] = drawn
        if self._history is not None:
            everyone = torch.zeros(len(self.lengths), dtype=torch.bool, device=logits.device)
            everyone[index] = True
            self._history = self._history.after(self._tokens[:, self.num_tokens], everyone)
        for request, wrote in zip(active, written, strict=True):
            self.lengths[request] += wrote
        self.num_tokens += 1
        return q, drawn

    def draft(self) -> Draft:
        """What was collected."""
        tokens, probs = self._tokens[:, : self.num_tokens], self._probs
        if probs is not None:
            probs = probs[:, : self.num_tokens + 1]
        return Draft(tokens, tuple(self.lengths), probs, tuple(range(-1, self.num_tokens - 1)))
