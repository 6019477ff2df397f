"""The drafting loop: draw a token, ask the policy which requests continue, stop when none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import ForwardInput
from draftwise.engine.masks import next_masks
from draftwise.engine.oracle import TargetOracle
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.memory import upload
from draftwise.policies.base import Policy
from draftwise.policies.inputs import DraftPosition, LazyPosition


class DraftingBackend(Protocol):
    """Draws a draft's tokens. It does not decide draft lengths."""

    def serves(self, step: DraftingStep) -> bool:
        """Whether the backend supports this step."""

    def begin(self, step: DraftingStep) -> None:
        """Read new tokens and compute the distribution of the first drafted token."""

    def draw(self, active: list[int], num_tokens: int) -> int:
        """Draw more tokens.

        Args:
            active: requests that continue drafting.
            num_tokens: number of positions to draw. The backend may draw more or fewer, but at
                least one.

        Returns:
            The number of positions drawn since :meth:`begin`.
        """

    def decided_lengths(self) -> dict[int, int]:
        """Draft lengths of the requests whose limits and NaN checks it applied itself."""

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """A drawn position, and for each active request whether its logits were NaN."""

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, cut to each request's length."""


def run_drafting(
    backend: DraftingBackend,
    step: DraftingStep,
    policy: Policy,
    oracle: TargetOracle | None = None,
) -> Draft:
    """Draft for one step.

    A backend may draw several positions before the policy is asked about them. The policy is then
    asked about each position in turn, with the signals of that position. Tokens drawn after a stop
    are discarded. The result is the same as if they had never been drawn.

    Args:
        backend: draws the tokens.
        step: the step, with at least one request that drafts.
        policy: decides which requests continue.
        oracle: adds the target's acceptance probability to each position; for studies.
    """
    asks_policy = oracle is not None or policy.may_stop_drafting
    backend.begin(step)
    progress = DraftProgress(step.limits)
    while progress.active:
        end = backend.draw(progress.active, 1 if asks_policy else step.longest)
        if not asks_policy and progress.settle(backend.decided_lengths()):
            return backend.finish(progress.lengths, end)
        while progress.active and progress.num_tokens < end:
            active = progress.active
            position, is_nan = backend.position(progress.num_tokens, active)
            if oracle is not None:
                position = oracle.score(position, *step.conditions(active))
            if not step.is_plain:
                step.append(active, position.tokens)
            progress.advance(answer(policy, position), is_nan)
            if step.is_masked:
                progress.active = [each for each in progress.active if not step.is_at_end(each)]
            if oracle is not None and progress.active:
                kept = [at for at, each in enumerate(active) if each in set(progress.active)]
                slots = [step.cache_slots[each] for each in progress.active]
                oracle.follow(slots, position.tokens[kept])
    return backend.finish(progress.lengths, progress.num_tokens)


class DraftProgress:
    """Tracks draft lengths and which requests continue after each drafted token.

    Attributes:
        limits: ``[batch]`` maximum draft length of each request.
        lengths: ``[batch]`` tokens drafted so far.
        active: indices of the requests that continue drafting.
        num_tokens: number of positions decided.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        """Start a step.

        Args:
            limits: ``[batch]`` maximum draft length of each request.
        """
        self.limits = list(limits)
        self.lengths = [0] * len(self.limits)
        self.active = [index for index, limit in enumerate(self.limits) if limit > 0]
        self.num_tokens = 0

    @property
    def longest(self) -> int:
        """The maximum draft length over all requests."""
        return max(self.limits, default=0)

    def advance(self, wanted: Sequence[bool] | None, is_nan: Sequence[bool] | None = None) -> None:
        """Count one more token for each active request and remove the requests that stop.

        Args:
            wanted: ``[active]`` whether the policy continues; ``None`` if all requests continue.
            is_nan: ``[active]`` whether the draft's logits were NaN. Such a token is not counted
                and ends the draft. ``None`` if no logits were NaN.
        """
        self.num_tokens += 1
        continuing = []
        for at, request in enumerate(self.active):
            if is_nan is not None and is_nan[at]:
                continue
            self.lengths[request] += 1
            if (wanted is None or wanted[at]) and self.limits[request] > self.num_tokens:
                continuing.append(request)
        self.active = continuing

    def settle(self, lengths: Mapping[int, int]) -> bool:
        """Set the lengths of requests whose drafts are complete.

        Args:
            lengths: draft lengths by request index.

        Returns:
            Whether all requests have stopped drafting.
        """
        for request, length in lengths.items():
            self.lengths[request] = length
        self.active = [request for request in self.active if request not in lengths]
        return not self.active


def answer(policy: Policy, position: DraftPosition) -> list[bool] | None:
    """Ask a policy which requests continue after a position; ``None`` for all of them."""
    wanted: Tensor | None = policy.keep_drafting(position)
    if wanted is None:
        return None
    continues: list[bool] = wanted.tolist()
    return continues


class DraftingStep:
    """A batch during drafting.

    Attributes:
        batch: the step's batch.
        limits: ``[batch]`` maximum draft length of each request.
        active: requests with a limit above 0.
        inputs: what the draft model reads before it draws the first token: prompt chunks, and the
            new tokens of each active request. Each active request gets one row of logits.
        signals: whether the draft's signals are computed.
        is_certain: whether the most likely tokens are proposed, with certainty.
        cache_slots: ``[batch]`` cache slot of each request.
        text_lengths: ``[batch]`` number of tokens of each request before the step.
    """

    def __init__(
        self,
        batch: Batch,
        limits: Sequence[int],
        signals: bool,
        vocab_size: int,
        device: torch.device,
        min_width: int = 0,
        is_certain: bool = False,
    ) -> None:
        """Set up.

        Args:
            batch: the step's batch.
            limits: ``[batch]`` maximum draft length of each request.
            signals: whether the draft's signals are computed.
            vocab_size: the target's vocabulary size.
            device: device on which tokens are drawn.
            min_width: minimum number of columns of the draft.
            is_certain: whether the most likely tokens are proposed, with certainty.
        """
        self.batch = batch
        self.limits = list(limits)
        self.active = [index for index, limit in enumerate(limits) if limit > 0]
        self.signals = signals
        self.is_certain = is_certain
        self.cache_slots = [request.cache_slot for request in batch.generating]
        self.text_lengths = [len(request.tokens) for request in batch.generating]
        self.inputs = [ForwardInput(chunk.request, chunk.end) for chunk in batch.chunks]
        for index in self.active:
            request = batch.generating[index]
            self.inputs.append(ForwardInput(request, len(request.tokens), num_logits=1))
        self.is_masked = batch.any_is_masked(self.active)
        self._vocab_size, self._device = vocab_size, device
        self._min_width = min_width
        self._token_history = batch.token_history
        # For masked requests, the allowed next tokens depend on the tokens drawn so far.
        self._drafted: dict[int, list[int]] = {
            index: [] for index, request in enumerate(batch.generating) if request.is_masked
        }

    @property
    def longest(self) -> int:
        """The maximum draft length over all requests."""
        return max(self.limits, default=0)

    @property
    def width(self) -> int:
        """Columns that the buffers need."""
        return max(self.longest, self._min_width)

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn for any request, so that q is needed."""
        return self.batch.uniforms is not None and not self.is_certain

    @property
    def own_draft_probs(self) -> bool:
        """Whether the draft's own distributions are needed and differ from q."""
        return self.signals and (not self.is_sampled or self.batch.controls.any_greedy)

    @property
    def is_plain(self) -> bool:
        """Whether the logits need no masks, no bias and no token history."""
        return not self.batch.controls.changes_tokens and not self.is_masked

    def conditions(self, active: Sequence[int]) -> tuple[LogitControls, TokenHistory | None]:
        """Sampling parameters and token history for the next token of the active requests."""
        controls, token_history = self.batch.controls, self._token_history
        if len(active) < len(self.limits):
            index = upload(active, torch.long, self._device)
            controls = controls.rows(index)
            token_history = None if token_history is None else token_history.rows(index)
        if not self._drafted.keys().isdisjoint(active):
            requests = self.batch.generating
            places = ((requests[index], self._drafted.get(index, ())) for index in active)
            controls = controls.masked(next_masks(places, self._vocab_size, self._device))
        return controls, token_history

    def append(self, active: Sequence[int], tokens: Tensor) -> None:
        """Record drawn tokens for the masks and penalties of the next ones.

        Args:
            active: indices of the requests.
            tokens: ``[active]`` int64.
        """
        if self._token_history is not None:
            drawn = torch.zeros(len(self.limits), dtype=torch.long, device=tokens.device)
            is_drawn = torch.zeros(len(self.limits), dtype=torch.bool, device=tokens.device)
            index = upload(active, torch.long, tokens.device)
            drawn[index], is_drawn[index] = tokens, True
            self._token_history = self._token_history.after(drawn, is_drawn)
        if not self._drafted.keys().isdisjoint(active):
            for request, token in zip(active, tokens.tolist(), strict=True):
                if request in self._drafted:
                    self._drafted[request].append(token)

    def is_at_end(self, request: int) -> bool:
        """Whether only an end-of-sequence token may follow a request's drafted tokens."""
        matcher = self.batch.generating[request].matcher
        return matcher is not None and matcher.is_end(self._drafted[request])

    def position(
        self,
        buffers: DraftBuffers,
        index: int,
        active: Sequence[int],
        widen: Callable[[Tensor], Tensor] | None = None,
    ) -> DraftPosition:
        """A position that was written to the buffers.

        Args:
            buffers: the buffers.
            index: position in the draft, from 0.
            active: requests that are still drafting.
            widen: converts distributions in the buffers to the target's vocabulary; ``None`` if
                they are over it.
        """
        tokens = buffers.tokens[active, index]
        if not self.signals:
            return DraftPosition(index, active, tokens, None, None, None)
        wide = buffers.draft_probs if self.own_draft_probs else buffers.probs
        return LazyPosition(
            index,
            active,
            tokens,
            wide[:, index],
            buffers.entropy[active, index],
            buffers.token_probs[active, index],
            widen=widen,
        )

    def collect(
        self,
        buffers: DraftBuffers,
        lengths: Sequence[int],
        num_tokens: int,
        written: Sequence[int] | None = None,
    ) -> Draft:
        """The draft that was written to the buffers; see :meth:`DraftBuffers.draft`."""
        uniforms = self.batch.uniforms
        return buffers.draft(
            lengths,
            max(num_tokens, self._min_width),
            None if uniforms is None else uniforms.stage,
            self.is_sampled,
            self.signals,
            self.own_draft_probs,
            written,
        )
