"""Draft sources: who writes ahead. A model, or nobody."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.signals import entropy, token_probabilities
from draftwise.core.types import Draft, DraftSignals
from draftwise.engine.batch import Batch
from draftwise.engine.chain import DraftChain
from draftwise.engine.drawing import draw
from draftwise.engine.follower import Follower, Reading
from draftwise.engine.masks import next_masks
from draftwise.engine.native_chain import NativeChain
from draftwise.engine.oracle import TargetOracle
from draftwise.models.transfer import upload
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
        states = batch.states(0)
        policy.draft_lengths(states)
        return _empty(len(states), self._device)


class ModelDraft:
    """A draft model that writes token by token, all requests of the batch at once.

    It follows the target's prompt chunk by chunk, without computing logits for prompts.
    """

    def __init__(
        self, follower: Follower, vocab_size: int, oracle: TargetOracle | None = None
    ) -> None:
        """Set up.

        Args:
            follower: the draft model and its cache.
            vocab_size: the target's.
            oracle: tells the policy what the target thinks of each token; for studies.
        """
        self._follower = follower
        self._oracle = oracle
        self._chain = DraftChain(follower)
        self._native = NativeChain(follower)
        self._vocab_size = vocab_size

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as far as the policy wants, at most to each request's limit."""
        states = batch.states(self._follower.capacity)
        lengths = policy.draft_lengths(states)
        limits = [min(n, state.draft_limit) for n, state in zip(lengths, states, strict=True)]
        active = [index for index, limit in enumerate(limits) if limit > 0]
        pending = self._pending(batch, active)
        if active and self._native.serves(batch, active):
            return self._native.draft(batch, policy, limits, active, pending, self._oracle)
        logits = self._follower.read(pending)[0]
        if self._oracle is not None:
            self._oracle.begin(batch, active)
        if logits is None:
            return _empty(len(states), self._follower.device)
        if self._oracle is None and self._chain.serves(batch, active):
            return self._chain.draft(batch, policy, limits, active, logits)
        writer = _DraftWriter(
            batch, max(limits), self._vocab_size, self._follower.device, policy.uses_draft_signals()
        )
        while True:
            index = writer.num_tokens
            controls, history = writer.conditions(active)
            position = writer.write(active, logits, controls, history)
            if self._oracle is not None:
                position = self._oracle.judge(position, controls, history)
            wanted = policy.keep_drafting(position)
            going = [True] * len(active) if wanted is None else wanted.tolist()
            stays = [
                at
                for at, request in enumerate(active)
                if going[at]
                and limits[request] > index + 1
                and writer.lengths[request] > index
                and not writer.is_at_end(request)
            ]
            if not stays:
                return writer.draft()
            drawn = position.tokens
            active = [active[at] for at in stays]
            if len(stays) < len(drawn):
                drawn = drawn[upload(stays, torch.long, drawn.device)]
            rows = [batch.generating[index].row for index in active]
            logits = self._follower.read_one(rows, drawn)
            if self._oracle is not None:
                self._oracle.follow(rows, drawn)

    def _pending(self, batch: Batch, active: list[int]) -> list[Reading]:
        """What the draft has not seen, with a logit of each active request's last token."""
        pending = [Reading(chunk.request, chunk.end) for chunk in batch.chunks]
        for index in active:
            request = batch.generating[index]
            pending.append(Reading(request, len(request.tokens), num_logits=1))
        return pending


def _empty(num_requests: int, device: torch.device) -> Draft:
    tokens = torch.zeros(num_requests, 0, dtype=torch.long, device=device)
    return Draft(tokens, (0,) * num_requests, None, ())


class _DraftWriter:
    """Collects a batch's draft position by position."""

    def __init__(
        self, batch: Batch, width: int, vocab_size: int, device: torch.device, signals: bool
    ) -> None:
        num_requests = len(batch.generating)
        self._batch = batch
        self._vocab_size = vocab_size
        self._history: TokenHistory | None = batch.history
        self._tokens = torch.zeros(num_requests, width, dtype=torch.long, device=device)
        self._probs: Tensor | None = None
        if batch.uniforms is not None:
            self._probs = torch.zeros(num_requests, width + 1, vocab_size, device=device)
            self._uniforms = upload(batch.uniforms.draft, torch.float64, device)
        self._beliefs: Tensor | None = None
        if signals:
            self._entropy = torch.zeros(num_requests, width, device=device)
            self._token_probs = torch.zeros(num_requests, width, device=device)
            if self._probs is None or batch.controls.any_greedy:
                self._beliefs = torch.zeros(num_requests, width, vocab_size, device=device)
        self._uses_signals = signals
        self.lengths = [0] * num_requests
        self.num_tokens = 0
        # Of the requests that are masked: what may come next depends on what was drawn.
        self._drafted: dict[int, list[int]] = {
            index: [] for index, request in enumerate(batch.generating) if request.is_masked
        }

    def conditions(self, active: list[int]) -> tuple[LogitControls, TokenHistory | None]:
        """Controls and history for the next token of the active requests."""
        controls, history = self._batch.controls, self._history
        if len(active) < len(self.lengths):
            index = upload(active, torch.long, self._tokens.device)
            controls = controls.rows(index)
            history = None if history is None else history.rows(index)
        if not self._drafted.keys().isdisjoint(active):
            requests = self._batch.generating
            places = ((requests[index], self._drafted.get(index, ())) for index in active)
            vocab_size, device = self._vocab_size, self._tokens.device
            controls = controls.masked(next_masks(places, vocab_size, device))
        return controls, history

    def is_at_end(self, request: int) -> bool:
        """Whether nothing but the end of the text may follow what was drafted for a request."""
        matcher = self._batch.generating[request].matcher
        return matcher is not None and matcher.is_end(self._drafted[request])

    def write(
        self,
        active: list[int],
        logits: Tensor,
        controls: LogitControls,
        history: TokenHistory | None,
    ) -> DraftPosition:
        """Draw the next token of the active requests."""
        at = self.num_tokens
        index = upload(active, torch.long, logits.device)
        uniforms = None if self._probs is None else self._uniforms[index, at]
        drawn, broken, q, belief = draw(logits, controls, history, uniforms, self._uses_signals)
        if controls.mask is not None:
            # A draft that gives nothing to any token that may come proposes nothing either.
            broken = broken | (controls.mask.gather(1, drawn.unsqueeze(1)).squeeze(1) < 0)
        written = [True] * len(active)
        if bool(broken.any()):
            # A draft that is not a number proposes nothing from here on.
            written = (~broken).tolist()
            drawn = torch.where(broken, 0, drawn)
            q = None if q is None else torch.where(broken.unsqueeze(1), 0.0, q)
        if q is not None:
            assert self._probs is not None
            self._probs[index, at] = q
        self._tokens[index, at] = drawn
        if self._history is not None:
            everyone = torch.zeros(len(self.lengths), dtype=torch.bool, device=logits.device)
            everyone[index] = True
            self._history = self._history.after(self._tokens[:, at], everyone)
        for request, wrote in zip(active, written, strict=True):
            self.lengths[request] += wrote
        if controls.mask is not None:
            for request, token in zip(active, drawn.tolist(), strict=True):
                if request in self._drafted:
                    self._drafted[request].append(token)
        self.num_tokens += 1
        if belief is None:
            return DraftPosition(at, active, drawn, None, None, None)
        belief = belief.nan_to_num(nan=0.0)
        uncertainty, confidence = entropy(belief), token_probabilities(belief, drawn)
        self._entropy[index, at] = uncertainty
        self._token_probs[index, at] = confidence
        if self._beliefs is not None:
            self._beliefs[index, at] = belief
        return DraftPosition(at, active, drawn, belief, uncertainty, confidence)

    def draft(self) -> Draft:
        """What was collected."""
        end = self.num_tokens
        tokens, probs = self._tokens[:, :end], self._probs
        if probs is not None:
            probs = probs[:, : end + 1]
        signals: DraftSignals | None = None
        if self._uses_signals:
            believed = probs if self._beliefs is None else self._beliefs
            assert believed is not None
            signals = DraftSignals(
                believed[:, :end], self._entropy[:, :end], self._token_probs[:, :end]
            )
        uniforms = self._batch.uniforms
        return Draft(
            tokens,
            tuple(self.lengths),
            probs,
            tuple(range(-1, end - 1)),
            signals,
            None if uniforms is None else uniforms.stage,
        )
