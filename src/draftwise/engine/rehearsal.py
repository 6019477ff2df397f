"""Prepares the passes of a policy's steps before the first request.

On CUDA the first pass of a size takes long: kernels are compiled, memory is allocated, and a graph
is captured (:mod:`draftwise.models.static_steps`). A rehearsal takes steps with made-up requests,
of all draft lengths that the policy chooses from, at batch sizes up to the largest. Their texts are
thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.engine import Engine
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.request import Request
from draftwise.errors import CacheExhaustedError, PromptError
from draftwise.params import SamplingParams
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, planned_drafts
from draftwise.policies.inputs import RequestState
from draftwise.policies.price import Adaptive

# Most seconds that a rehearsal takes. What is not prepared by then is prepared when it occurs.
LIMIT_SECONDS = 20.0
# Steps of each size: one that runs it, one that captures it, and one that replays it.
_STEPS = 3
# Tokens of a made-up prompt, fewer than a block of the prefix cache.
_PROMPT = (1, 2, 3, 4)


class _Script(Policy):
    """Drafts a given number of tokens for every request.

    Attributes:
        length: that number.
        scored: whether a companion scores the draft.
    """

    name = "rehearsal"
    summary = "a given number of tokens"
    source = "this project"
    length = 0
    scored = False

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Never."""
        return False

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The same number for every request."""
        return DraftPlan([self.length] * len(requests), scored=self.scored)

    @property
    def uses_draft_signals(self) -> bool:
        """Where a companion scores the draft."""
        return self.scored


class _AnyTokens:
    """Stands in for a proposer without a model. Which tokens it proposes does not matter."""

    looking_seconds = 0.0

    def __init__(self, context: ProposerContext) -> None:
        self._context = context

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Copies of one token."""
        context = self._context
        states = batch.states(lambda request: context.max_model_len - len(request.tokens))
        lengths = planned_drafts(policy, states).lengths
        made = Proposals.nothing(len(lengths), max(lengths, default=0))
        return made.draft(
            lengths, context.vocab_size, context.device, batch.uniforms, policy.uses_draft_signals
        )


def batch_sizes(largest: int) -> list[int]:
    """Batch sizes of a rehearsal: 1, 2, 4, … and the largest."""
    return sorted({*(1 << n for n in range(largest.bit_length())), largest})


def rehearse(
    engine: Engine,
    max_batch_size: int,
    on_status: Callable[[str], None],
    limit_seconds: float = LIMIT_SECONDS,
) -> int:
    """Take steps of all sizes that the engine's policy chooses from.

    Args:
        engine: the engine, without requests.
        max_batch_size: largest batch.
        on_status: called with a description before the steps of each batch size.
        limit_seconds: the rehearsal ends after this time.

    Returns:
        The number of steps.
    """
    pipeline = engine.pipeline
    router, proposer = pipeline.policies, pipeline.proposer
    policy, guard = router.default, router.guard
    gamma = router.num_speculative_tokens
    lengths = policy.lengths if isinstance(policy, Adaptive) else [gamma]
    script = _Script(PolicyContext(gamma))
    deadline = time.perf_counter() + limit_seconds
    num_steps = 0
    router.default, router.guard = script, None
    if proposer.context.draft_model is None and gamma:
        pipeline.proposer = _AnyTokens(proposer.context)  # type: ignore[assignment]
    if engine.corpus is not None:
        engine.corpus.is_open = False
    try:
        for size in batch_sizes(max_batch_size):
            on_status(f"preparing steps of {size} request{'s' * (size > 1)}")
            for temperature in (0.0, 1.0):
                for length in [0, *lengths]:
                    for script.scored in {False, length > 0 and pipeline.companion is not None}:
                        script.length = length
                        num_steps += _take_steps(engine, size, length, temperature, deadline)
                        if time.perf_counter() > deadline:
                            return num_steps
    except (CacheExhaustedError, PromptError):
        pass  # batches of this size do not fit, so they cannot occur either
    finally:
        router.default, router.guard = policy, guard
        pipeline.proposer = proposer
        if engine.corpus is not None:
            engine.corpus.is_open = True
    return num_steps


def _take_steps(engine: Engine, size: int, length: int, temperature: float, deadline: float) -> int:
    """Steps of one size, after those that read the prompts."""
    params = SamplingParams(
        temperature=temperature,
        max_tokens=_STEPS * (length + 1) + 1,
        ignore_eos=True,
        cache_salt="rehearsal",
    )
    requests: list[Request] = []
    num_steps = done = 0
    try:
        for _ in range(size):
            requests.append(engine.add(None, list(_PROMPT), params))
        while done < _STEPS and engine.num_unfinished and time.perf_counter() <= deadline:
            done += all(request.num_output_tokens for request in requests)
            engine.step()
            num_steps += 1
    finally:
        for request in requests:
            engine.cancel(request)
    return num_steps
