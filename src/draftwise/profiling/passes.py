"""Single passes of the models, made up and timed.

They run through the engine's own stages (drafting, judging, verification, acceptance) on requests
and caches that stand for any batch and context, without processing a prompt first. So the times
include what a step of the engine includes: probabilities, drawing tokens, the acceptance law.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.random import step_uniforms
from draftwise.core.types import Draft, DraftSignals, Plan
from draftwise.engine.assembly import Models
from draftwise.engine.batch import Batch
from draftwise.engine.controls import batch_controls
from draftwise.engine.drafting import ModelDraft
from draftwise.engine.follower import Follower
from draftwise.engine.judging import Companion
from draftwise.engine.request import Request
from draftwise.engine.verification import Acceptance, TargetVerifier
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.params import RequestSpeculation, SamplingParams
from draftwise.policies.base import PolicyContext, Signal
from draftwise.policies.fixed import FixedLength

# Passes of the draft timed together: the first one of a step reads more and sets up.
_DEPTH = 4


class Stage(StrEnum):
    """What is timed."""

    TARGET = "target"
    DRAFT = "draft"
    COMPANION = "companion"


class PassShape(NamedTuple):
    """What one pass is asked to do.

    Attributes:
        num_requests: requests of the batch.
        num_tokens: the target's tokens (those verified and one for each request), the companion's
            (those judged), or the draft's (one for each request).
        context: tokens of context of each request, in the mean: real batches are not all of one
            length, and uneven ones take longer. Half of the requests have a quarter less, half a
            quarter more.
    """

    num_requests: int
    num_tokens: int
    context: int

    @property
    def contexts(self) -> list[int]:
        """Of each request; they sum up to ``num_requests * context``."""
        apart = self.context // 4
        pairs = [self.context - apart, self.context + apart] * (self.num_requests // 2)
        return pairs + [self.context] * (self.num_requests % 2)


class _DraftAll(FixedLength):
    """Drafts to the end and computes the draft's signals on the way, as adaptive policies do."""

    signals = frozenset({Signal.ENTROPY, Signal.TOKEN_PROBABILITY})


class PassTimer:
    """Times passes of loaded models in caches of its own.

    Not safe to call from several threads, except for different stages.

    Attributes:
        stages: those there is a model for.
    """

    def __init__(
        self, models: Models, max_requests: int, max_context: int, num_speculative_tokens: int
    ) -> None:
        """Set up caches; their memory is touched as far as passes reach.

        Args:
            models: loaded.
            max_requests: largest batch.
            max_context: longest context of a pass, at most :func:`longest_context`.
            num_speculative_tokens: most tokens drafted per step.
        """
        target = models.target.model
        self._device = target.device
        self._vocab_size = target.vocab_size
        self._num_drafted = max(1, num_speculative_tokens)
        self._capacity = max_context + max_context // 4 + self._num_drafted + 2
        self._max_requests = max_requests
        self._filled: dict[Stage, list[int]] = {}
        self._caches: dict[Stage, KVCache] = {}
        self._models: dict[Stage, LoadedModel] = {}
        self._batches: dict[tuple[int, int], Batch] = {}
        self._generator = torch.Generator().manual_seed(0)
        self._verifier = TargetVerifier(target, self._new_cache(Stage.TARGET, models.target))
        self._acceptance = Acceptance("block")
        self._drafter: ModelDraft | None = None
        self._companion: Companion | None = None
        if models.draft is not None:
            self._drafter = ModelDraft(self._follower(Stage.DRAFT, models.draft), self._vocab_size)
        if models.companion is not None:
            follower = self._follower(Stage.COMPANION, models.companion)
            self._companion = Companion(follower, self._vocab_size)
        self._draft_depth = min(_DEPTH, self._num_drafted)
        self._policy = _DraftAll(PolicyContext(self._draft_depth))
        self.stages = tuple(self._models)

    @torch.inference_mode()
    def __call__(self, stage: Stage, shape: PassShape) -> float:
        """Seconds of one pass; of the draft, the mean over a few in a row."""
        self._rewind(stage, shape)
        batch = self._batch(shape)
        if stage is Stage.TARGET:
            return self._timed(self._target_pass(batch, shape))
        if stage is Stage.DRAFT:
            assert self._drafter is not None
            drafter = self._drafter
            return self._timed(lambda: drafter.propose(batch, self._policy)) / self._draft_depth
        assert self._companion is not None
        companion, draft = self._companion, self._made_up_draft(shape.num_requests, shape[1])
        return self._timed(lambda: companion.judge(batch, draft))

    def _target_pass(self, batch: Batch, shape: PassShape) -> Callable[[], object]:
        draft = self._made_up_draft(shape.num_requests, shape.num_tokens - shape.num_requests)
        plan = Plan(draft.tokens, draft.lengths, draft.probs)

        def run() -> None:
            logits = self._verifier.verify(batch, plan)
            self._acceptance.accept(batch, draft, plan, logits)

        return run

    def _made_up_draft(self, num_requests: int, num_tokens: int) -> Draft:
        """``num_tokens`` random tokens shared out evenly, from flat distributions."""
        share, more = divmod(num_tokens, num_requests)
        lengths = tuple(share + (index < more) for index in range(num_requests))
        width = lengths[0]
        tokens = self._random_tokens(num_requests, width)
        shape = num_requests, width + 1, self._vocab_size
        probs = torch.full(shape, 1 / self._vocab_size, device=self._device)
        flat = torch.zeros(num_requests, width, device=self._device)
        signals = DraftSignals(probs[:, :width], flat, flat + 1 / self._vocab_size)
        return Draft(tokens, lengths, probs, tuple(range(-1, width - 1)), signals)

    def _random_tokens(self, *shape: int) -> Tensor:
        """Not all the same, or a mixture of experts would use only a few of them."""
        tokens = torch.randint(0, self._vocab_size, shape, generator=self._generator)
        return tokens.to(self._device)

    def _batch(self, shape: PassShape) -> Batch:
        """The first requests, each with its context and one token that no model has read."""
        num_requests, contexts = shape.num_requests, shape.contexts
        key = num_requests, shape.context
        if key not in self._batches:
            params = SamplingParams(max_tokens=self._num_drafted + 2, temperature=1.0, seed=0)
            requests = [
                Request(
                    row,
                    None,
                    self._random_tokens(context + 1).tolist(),
                    params,
                    None,
                    frozenset(),
                    self._capacity + 1,
                    RequestSpeculation(),
                )
                for row, context in enumerate(contexts)
            ]
            for request in requests:
                request.row = request.request_id
            self._batches[key] = Batch(
                chunks=[],
                generating=requests,
                can_draft=[True] * num_requests,
                controls=batch_controls([params] * num_requests, self._vocab_size, self._device),
                history=None,
                uniforms=step_uniforms(list(range(num_requests)), contexts, self._num_drafted),
                lenience=[1.0] * num_requests,
            )
        return self._batches[key]

    def _follower(self, stage: Stage, model: LoadedModel) -> Follower:
        return Follower(model.model, self._new_cache(stage, model), self._vocab_size)

    def _new_cache(self, stage: Stage, model: LoadedModel) -> KVCache:
        self._models[stage] = model
        self._caches[stage] = model.model.new_cache(self._max_requests, self._capacity)
        self._filled[stage] = [0] * self._max_requests
        return self._caches[stage]

    def _rewind(self, stage: Stage, shape: PassShape) -> None:
        """Put the rows back to the context, with memory behind it that was written to."""
        cache, filled = self._caches[stage], self._filled[stage]
        for row, context in enumerate(shape.contexts):
            if filled[row] < context:
                self._fill(cache, self._models[stage], row, filled[row], context)
                filled[row] = context
            cache.truncate(row, 0)
            cache.advance(row, context)

    def _fill(self, cache: KVCache, model: LoadedModel, row: int, start: int, end: int) -> None:
        slots = torch.arange(start, end, device=self._device) + row * cache.capacity
        for index, layer in enumerate(model.model.layers):
            keys, values = (
                torch.full(
                    (end - start, layer.num_heads, size),
                    0.1,
                    dtype=model.model.dtype,
                    device=self._device,
                )
                for size in (layer.key_size, layer.value_size)
            )
            cache.write(index, slots, keys, values)

    def _timed(self, run: Callable[[], object]) -> float:
        self._synchronise()
        start = time.perf_counter()
        run()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def longest_context(models: Models, num_speculative_tokens: int) -> int:
    """Longest context that passes can have in all models, at least 1."""
    present: Sequence[LoadedModel] = [
        model for model in (models.target, models.draft, models.companion) if model is not None
    ]
    room = min(model.max_model_len for model in present)
    return max(1, 4 * (room - max(1, num_speculative_tokens) - 2) // 5)
