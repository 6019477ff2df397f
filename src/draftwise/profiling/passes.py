"""Time single synthetic passes of the models.

The passes run the engine's own stages (drafting, companion scoring, verification, acceptance) on
synthetic requests and caches of any batch size and context, without processing a prompt first. The
times therefore include probabilities, sampling and the acceptance law, as in a step of the engine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.types import Draft, DraftSignals, Plan
from draftwise.engine.acceptance import Acceptance
from draftwise.engine.assembly import Models
from draftwise.engine.batch import Batch, batch_controls
from draftwise.engine.cached_assistant import CachedAssistant
from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.engine.cached_exit import CachedExit
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.companion import CompanionModel
from draftwise.engine.kept_states import KeptStates
from draftwise.engine.mapped_model import new_cached_model
from draftwise.engine.one_pass_head import OnePassHead
from draftwise.engine.proposers.assistant import AssistantProposer
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.block import BlockProposer
from draftwise.engine.proposers.eagle import EagleProposer
from draftwise.engine.proposers.exit import ExitProposer
from draftwise.engine.proposers.model import ModelProposer
from draftwise.engine.request import Request
from draftwise.engine.verification import TargetVerifier
from draftwise.kernels.native.sampling import step_uniforms
from draftwise.models.exits.model import ExitModel
from draftwise.models.heads.assistant import AssistantModel
from draftwise.models.heads.draft_head import DraftHead
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.params import SamplingParams
from draftwise.policies.base import PolicyContext, Signal
from draftwise.policies.fixed import FixedLength
from draftwise.speculation import RequestSpeculation

# Number of draft passes timed together. The first pass of a step also sets up the draft; see
# :meth:`PassTimer.first_draft_extra`.
_DEPTH = 4
# Number of measurements of the first draft pass, and of untimed runs before them. A new size may
# compile kernels, or record a graph in its second run.
_FIRST_REPEATS, _FIRST_WARM_UPS = 5, 2


class Stage(StrEnum):
    """Stage of a step whose passes are timed."""

    TARGET = "target"
    DRAFT = "draft"
    COMPANION = "companion"


class PassShape(NamedTuple):
    """Workload of one pass.

    Attributes:
        num_requests: number of requests in the batch.
        num_tokens: number of tokens of the pass. The target's are the verified tokens plus one for
            each request, the companion's are the scored tokens, and the draft's are one for each
            request.
        context: mean number of context tokens per request. Half of the requests have a quarter
            less and half a quarter more, as real batches are uneven and uneven batches take longer.
    """

    num_requests: int
    num_tokens: int
    context: int

    @property
    def contexts(self) -> list[int]:
        """Context tokens of each request; their sum is ``num_requests * context``."""
        apart = self.context // 4
        pairs = [self.context - apart, self.context + apart] * (self.num_requests // 2)
        return pairs + [self.context] * (self.num_requests % 2)


class _DraftAll(FixedLength):
    """Drafts the full length and requests the draft's signals, as adaptive policies do."""

    signals = frozenset({Signal.ENTROPY, Signal.TOKEN_PROBABILITY})


class PassTimer:
    """Times passes of loaded models, with its own KV caches.

    An exit runs on the target's cache, as in the engine. With an exit as the draft, passes of the
    target and of a deeper exit are timed as they run after a draft. Of each request with drafted
    tokens, the exit has read all tokens but the last one, so only the other layers are computed for
    these. Requests without drafted tokens are computed whole. With an exit as the companion only,
    passes of the target compute all layers.

    The engine's verifications may cost less than that: the last drafted token of a request was
    dropped, so that no token needs the lower layers, or a deeper exit has judged the draft, so that
    fewer layers are left. Costs are a function of the number of tokens, which does not tell these
    cases. They are overestimated by the skipped layers until steps have corrected the costs; see
    :class:`draftwise.core.stage_cost.LiveCost`.

    Calls from several threads are safe only for different stages, and with an exit not at all.

    Attributes:
        stages: stages that have a model.
        draft_depth: number of draft passes that are timed together.
    """

    def __init__(
        self,
        models: Models,
        max_requests: int,
        max_context: int,
        num_speculative_tokens: int,
        signals: bool = True,
    ) -> None:
        """Allocate the caches. Memory is written only as far as passes use it.

        Args:
            models: loaded models.
            max_requests: largest batch.
            max_context: longest context of a pass, at most :func:`longest_context`.
            num_speculative_tokens: maximum number of tokens drafted per request and step.
            signals: whether the draft's passes compute its signals, as for policies that read them.
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
        self._kept = KeptStates(target) if models.have_exit else None
        self._verifier = TargetVerifier(
            target, self._new_cache(Stage.TARGET, models.target), (), self._kept
        )
        self._acceptance = Acceptance("block")
        self._drafter: ModelProposer | None = None
        self._head: CachedDraftHead | CachedAssistant | None = None
        self._exit: CachedExit | None = None
        self._companion: CompanionModel | None = None
        if models.draft is not None:
            draft = self._cached_model(Stage.DRAFT, models.draft)
            context = ProposerContext(
                self._vocab_size, self._device, max_requests, self._capacity, draft
            )
            proposer = ModelProposer
            if isinstance(draft, CachedDraftHead):
                is_block = isinstance(draft, OnePassHead)
                self._head, proposer = draft, BlockProposer if is_block else EagleProposer
            elif isinstance(draft, CachedAssistant):
                self._head, proposer = draft, AssistantProposer
            elif isinstance(draft, CachedExit):
                self._exit, proposer = draft, ExitProposer
            self._drafter = proposer(context)
        if models.companion is not None:
            cached_model = self._cached_model(Stage.COMPANION, models.companion)
            self._companion = CompanionModel(cached_model, self._vocab_size)
        self.draft_depth = min(_DEPTH, self._num_drafted)
        policy = _DraftAll if signals else FixedLength
        self._policy = policy(PolicyContext(self.draft_depth))
        self.stages = tuple(self._models)

    @torch.inference_mode()
    def __call__(self, stage: Stage, shape: PassShape) -> float:
        """Seconds of one pass; for the draft, the mean over a few consecutive passes."""
        self._rewind(stage, shape)
        batch = self._batch(shape)
        if stage is Stage.TARGET:
            return self._timed(self._target_pass(batch, shape))
        if stage is Stage.DRAFT:
            return self._draft_seconds(batch, self.draft_depth) / self.draft_depth
        assert self._companion is not None
        companion, draft = self._companion, self._synthetic_draft(shape.num_requests, shape[1])
        self._leave(batch, draft)
        return self._timed(lambda: companion.score(batch, draft))

    @torch.inference_mode()
    def first_draft_extra(self, shape: PassShape, deadline: float = math.inf) -> float:
        """Seconds that the first draft pass of a step takes beyond the others.

        It is the median of differences between drafts of one token and of several; 0 if no more
        than one token is drafted, or if there is no time for any measurement.

        Args:
            shape: shape of a draft pass.
            deadline: no measurement begins after this value of ``time.perf_counter``.
        """
        depth, extras = self.draft_depth, []
        if depth == 1:
            return 0.0
        for repeat in range(_FIRST_WARM_UPS + _FIRST_REPEATS):
            if time.perf_counter() > deadline:
                break
            seconds = [self.drafting_seconds(shape, length) for length in (1, depth)]
            if repeat >= _FIRST_WARM_UPS:
                extras.append((depth * seconds[0] - seconds[1]) / (depth - 1))
        return max(0.0, statistics.median(extras)) if extras else 0.0

    @torch.inference_mode()
    def drafting_seconds(self, shape: PassShape, length: int) -> float:
        """Seconds of all draft passes of a step.

        Args:
            shape: shape of one of them.
            length: number of tokens drafted for each request.
        """
        self._rewind(Stage.DRAFT, shape)
        return self._draft_seconds(self._batch(shape), length)

    def _draft_seconds(self, batch: Batch, length: int) -> float:
        """Seconds to draft ``length`` tokens for each request."""
        assert self._drafter is not None
        drafter, limits = self._drafter, [length] * len(batch.generating)
        return self._timed(lambda: drafter.draft(batch, self._policy, limits))

    def _target_pass(self, batch: Batch, shape: PassShape) -> Callable[[], object]:
        draft = self._synthetic_draft(shape.num_requests, shape.num_tokens - shape.num_requests)
        plan = Plan(draft.tokens, draft.lengths, draft.probs)
        self._leave(batch, draft)

        def run() -> None:
            verified = self._verifier.verify(batch, plan)
            self._acceptance.accept(batch, draft, plan, verified.logits)

        return run

    def _leave(self, batch: Batch, draft: Draft) -> None:
        """Prepare a pass as if an exit had drafted these tokens."""
        if self._kept is None:
            return
        for index, request in enumerate(batch.generating):
            self._kept.forget(request.cache_slot)
            if self._exit is not None and draft.lengths[index]:
                read = draft.host_tokens[index][: draft.lengths[index] - 1]
                self._exit.assume_drafted(request, read)

    def _synthetic_draft(self, num_requests: int, num_tokens: int) -> Draft:
        """``num_tokens`` random tokens, divided evenly, with uniform distributions."""
        share, more = divmod(num_tokens, num_requests)
        lengths = tuple(share + (index < more) for index in range(num_requests))
        width = lengths[0]
        tokens = self._random_tokens(num_requests, width)
        shape = num_requests, width + 1, self._vocab_size
        probs = torch.full(shape, 1 / self._vocab_size, device=self._device)
        flat = torch.zeros(num_requests, width, device=self._device)
        signals = DraftSignals(probs[:, :width], flat, flat + 1 / self._vocab_size)
        return Draft(tokens, lengths, probs, signals)

    def _random_tokens(self, *shape: int) -> Tensor:
        """Random token ids, so that a mixture-of-experts model uses many experts."""
        tokens = torch.randint(0, self._vocab_size, shape, generator=self._generator)
        return tokens.to(self._device)

    def _batch(self, shape: PassShape) -> Batch:
        """A batch of requests, each with its context and one unprocessed token."""
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
                request.cache_slot = request.request_id
            self._batches[key] = Batch(
                chunks=[],
                generating=requests,
                can_draft=[True] * num_requests,
                controls=batch_controls([params] * num_requests, self._vocab_size, self._device),
                token_history=None,
                uniforms=step_uniforms(list(range(num_requests)), contexts, self._num_drafted),
                lenience=[1.0] * num_requests,
            )
        return self._batches[key]

    def _cached_model(self, stage: Stage, model: LoadedModel) -> CachedModel:
        if isinstance(model.model, ExitModel | AssistantModel):
            self._models[stage] = self._models[Stage.TARGET]
            self._caches[stage] = self._caches[Stage.TARGET]
            self._filled[stage] = self._filled[Stage.TARGET]
        if isinstance(model.model, AssistantModel):
            return CachedAssistant(model.model, self._caches[stage], self._vocab_size)
        if isinstance(model.model, ExitModel):
            assert self._kept is not None
            return CachedExit(model.model, self._caches[stage], self._vocab_size, self._kept)
        cache = self._new_cache(stage, model)
        if isinstance(model.model, DraftHead):
            return new_cached_model(model, cache, self._vocab_size)
        return CachedModel(model.model, cache, self._vocab_size)

    def _new_cache(self, stage: Stage, model: LoadedModel) -> KVCache:
        self._models[stage] = model
        self._caches[stage] = model.model.new_cache(self._max_requests, self._capacity)
        self._filled[stage] = [0] * self._max_requests
        return self._caches[stage]

    def _rewind(self, stage: Stage, shape: PassShape) -> None:
        """Reset each cache slot to its context length. Fill keys and values that are missing."""
        cache, filled = self._caches[stage], self._filled[stage]
        for cache_slot, context in enumerate(shape.contexts):
            if filled[cache_slot] < context:
                self._fill(cache, self._models[stage], cache_slot, filled[cache_slot], context)
                filled[cache_slot] = context
            if self._head is not None and stage is Stage.DRAFT:
                self._head.assume_read(cache_slot, context - 1)
                continue
            cache.assume(cache_slot, context)

    def _fill(
        self, cache: KVCache, model: LoadedModel, cache_slot: int, start: int, end: int
    ) -> None:
        slots = torch.arange(start, end, device=self._device) + cache_slot * cache.capacity
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
    """Longest context of a pass that all models support, at least 1."""
    present: Sequence[LoadedModel] = [
        model for model in (models.target, models.draft, models.companion) if model is not None
    ]
    room = min(model.max_model_len for model in present)
    return max(1, 4 * (room - max(1, num_speculative_tokens) - 2) // 5)
