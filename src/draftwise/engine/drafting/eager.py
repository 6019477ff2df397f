"""Drafting token by token with the model's ordinary forward pass. It supports every step."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.types import Draft
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.drafting.sampling import draw
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.memory import upload
from draftwise.policies.inputs import DraftPosition


class EagerBackend:
    """One forward pass per token, with masks and penalties for the requests that use them."""

    def __init__(self, cached_model: CachedModel) -> None:
        """Set up for a draft model. Memory is allocated by the first draft."""
        self._model = cached_model
        self._buffers = DraftBuffers(0, 0, 0)
        self._last: tuple[DraftPosition, list[bool]] | None = None

    def serves(self, step: DraftingStep) -> bool:
        """Always: this backend supports every step."""
        return True

    def begin(self, step: DraftingStep) -> None:
        """Read new tokens."""
        self._step = step
        self._num_tokens = 0
        self._last = None
        logits, _ = self._model.read(step.inputs)
        assert logits is not None
        self._logits = logits
        if not self._buffers.fits(len(step.limits), step.width):
            model = self._model
            self._buffers = DraftBuffers(model.num_rows, step.width, model.vocab_size, model.device)
        if step.is_sampled:
            uniforms = step.batch.uniforms
            assert uniforms is not None
            self._uniforms = upload(uniforms.draft, torch.float64, self._model.device)

    def draw(self, active: list[int], num_tokens: int) -> int:
        """Draw one token for each active request."""
        if self._last is not None:
            rows = [self._step.cache_slots[request] for request in active]
            self._logits = self._model.read_one(rows, self._drawn_last(active))
        self._last = self._write(active, *self._step.conditions(active))
        self._num_tokens += 1
        return self._num_tokens

    def decided_lengths(self) -> dict[int, int]:
        """None: this backend does not decide lengths."""
        return {}

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """The most recently drawn position."""
        assert self._last is not None
        return self._last

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length."""
        return self._step.collect(self._buffers, lengths, num_tokens)

    def _drawn_last(self, active: list[int]) -> Tensor:
        assert self._last is not None
        position, _ = self._last
        if len(active) == len(position.requests):
            return position.tokens
        kept = [at for at, request in enumerate(position.requests) if request in set(active)]
        return position.tokens[upload(kept, torch.long, position.tokens.device)]

    def _write(
        self, active: list[int], controls: LogitControls, token_history: TokenHistory | None
    ) -> tuple[DraftPosition, list[bool]]:
        step, buffers, at = self._step, self._buffers, self._num_tokens
        logits = self._logits
        index = upload(active, torch.long, logits.device)
        uniforms = self._uniforms[index, at] if step.is_sampled else None
        drawn, is_nan, q, draft_probs = draw(
            logits, controls, token_history, uniforms, step.signals
        )
        if controls.mask is not None:
            # All allowed tokens have probability 0, so nothing can be proposed.
            is_nan = is_nan | (controls.mask.gather(1, drawn.unsqueeze(1)).squeeze(1) < 0)
        failed = [False] * len(active)
        if bool(is_nan.any()):
            failed = is_nan.tolist()
            drawn = torch.where(is_nan, 0, drawn)
            q = None if q is None else torch.where(is_nan.unsqueeze(1), 0.0, q)
        if q is not None:
            buffers.probs[index, at] = q
        buffers.tokens[index, at] = drawn
        if draft_probs is None:
            return DraftPosition(at, active, drawn, None, None, None), failed
        draft_probs = draft_probs.nan_to_num(nan=0.0)
        uncertainty, confidence = entropy(draft_probs), token_probabilities(draft_probs, drawn)
        buffers.entropy[index, at] = uncertainty
        buffers.token_probs[index, at] = confidence
        if step.own_draft_probs:
            buffers.draft_probs[index, at] = draft_probs
        return DraftPosition(at, active, drawn, draft_probs, uncertainty, confidence), failed
