"""The speculative part of a step, what a step has computed so far, and learning from its times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.core.types import (
    CompanionScores,
    Draft,
    OneHotSignals,
    Outcome,
    Plan,
    StepTimes,
    TreeDraft,
)
from draftwise.engine.batch import Batch
from draftwise.engine.companion import Companion
from draftwise.engine.lifecycle import FollowsRequests, StateRows
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.proposers.base import Proposer
from draftwise.models.static_steps import Recording
from draftwise.policies.router import PolicyRouter

# All of the first steps are learnt from, then one step in a few, because learning takes time.
_WARM_UP = 64
_LEARN_EVERY = 4


@dataclass(eq=False)
class SpeculationPipeline:
    """Proposer, companion and policies, with the state of one step.

    Attributes:
        policies: decide how much is drafted and verified.
        proposer: drafts tokens.
        companion: scores drafts; ``None`` without one.
        oracle: scores drafts instead of the companion, for studies.
    """

    policies: PolicyRouter
    proposer: Proposer
    companion: Companion | None
    oracle: TargetOracle | None = None

    @property
    def followers(self) -> Sequence[FollowsRequests]:
        """The parts that keep state for each request."""
        parts = self.proposer, self.companion, self.oracle
        return [part for part in parts if part is not None]

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Draft:
        """Draft as many tokens as the policies want."""
        return self.proposer.propose(batch, self.policies)

    @torch.inference_mode()
    def score(self, batch: Batch, draft: Draft) -> CompanionScores | None:
        """The companion's scores; ``None`` if there is no companion or no policy wants it now."""
        if self.oracle is not None:
            return self.oracle.scores(draft) if any(draft.lengths) else None
        if self.companion is None:
            return None
        if any(draft.lengths) and self.policies.wants_companion:
            return self.companion.score(batch, draft)
        self.companion.read_prompts(batch)
        return None

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the tokens that the target verifies."""
        plan = self.policies.select(draft, companion_scores)
        if isinstance(draft, TreeDraft) and any(draft.lengths):
            return replace(plan, parents=draft.parents)
        return plan

    def counted(self, times: StepTimes) -> StepTimes:
        """A step's times with the time of looking for continuations, and without the oracle's."""
        if self.proposer.looking_seconds:
            times = replace(times, looking=self.proposer.looking_seconds)
        if self.oracle is None:
            return times
        uncounted = self.oracle.take_seconds_of_drafting()
        return replace(times, draft=times.draft - uncounted, companion=0.0)

    def close(self) -> None:
        """Release memory, threads and processes."""
        self.proposer.close()
        if self.companion is not None:
            self.companion.close()


class Stopwatch:
    """Splits one step's wall time into named parts.

    Attributes:
        has_paused: whether time between two parts was left out. The step's times are then disturbed
            by what happened meanwhile.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._num_prepared = Recording.num_prepared
        self.has_paused = False

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        now = time.perf_counter()
        self._seconds[part] = now - self._last
        self._last = now

    def start_again(self) -> None:
        """Discard the time since the last lap."""
        self._last = time.perf_counter()
        self.has_paused = True

    def since_last_lap(self) -> float:
        """Seconds since the last lap."""
        return time.perf_counter() - self._last

    def times(self, rest_before: float, num_prompt_tokens: int) -> StepTimes:
        """The time of each part, and the time of the previous step after its last lap.

        Args:
            rest_before: that time of the previous step, in seconds.
            num_prompt_tokens: number of prompt tokens that the step processed.
        """
        seconds = self._seconds
        # Passes of new sizes were run or captured, which takes longer than a replay.
        prepared = Recording.num_prepared > self._num_prepared
        return StepTimes(
            seconds["draft"],
            seconds["companion"],
            seconds["select"],
            seconds["verify"],
            seconds["accept"],
            seconds["rest"] + rest_before,
            num_prompt_tokens,
            disturbed=prepared or self.has_paused,
            prepared=prepared,
        )


@dataclass(frozen=True)
class PreparedStep:
    """A step before the target verifies its draft.

    Attributes:
        pipeline: the pipeline that drafted, scored and selected tokens.
        clock: measures the step's times.
        batch: the step's batch.
        draft: the proposed tokens.
        companion_scores: the companion's scores of the draft; ``None`` if the draft was not scored.
        plan: the tokens to verify.
    """

    pipeline: SpeculationPipeline
    clock: Stopwatch
    batch: Batch
    draft: Draft
    companion_scores: CompanionScores | None
    plan: Plan


@dataclass(frozen=True)
class Step(PreparedStep):
    """A step after the target has verified its draft.

    Attributes:
        logits: ``[rows, vocab]`` logits of the target; ``None`` in a step that only read prompts.
        states: by cache slot, hidden states of the target; ``None`` if the proposer reads none.
        outcome: the acceptance decisions.
        accepted: for token trees, the accepted paths as chains, to which the logits and the states
            then belong; ``None`` for chains.
    """

    logits: Tensor | None
    states: dict[int, StateRows] | None
    outcome: Outcome
    accepted: Plan | None = None

    @property
    def num_scored(self) -> list[int]:
        """``[batch]`` number of tokens that the companion scored; empty if it scored no draft."""
        if self.companion_scores is None:
            return []
        return list(self.draft.lengths)

    @property
    def is_typical(self) -> bool:
        """Whether every request could draft, and no prompt was read."""
        batch = self.batch
        return not batch.chunks and bool(batch.generating) and all(batch.can_draft)

    @property
    def num_target_tokens(self) -> int:
        """Number of tokens that the target read, without prompts."""
        return len(self.plan.lengths) + sum(self.plan.lengths)

    @property
    def num_companion_tokens(self) -> int:
        """Number of tokens in the companion's pass, without those that it caught up with.

        An oracle that scores in its place has such a number too.
        """
        return sum(self.num_scored)

    @property
    def context(self) -> int:
        """Total number of tokens of all requests in the step."""
        return sum(len(request.tokens) for request in self.batch.generating)

    def take_notes(self) -> list[int]:
        """Record which outputs are no longer exactly the target's, and which drafts were scored.

        Returns:
            Number of tokens of each request before the step.
        """
        batch, scored, pipeline = self.batch, self.num_scored, self.pipeline
        for index, request in enumerate(batch.generating):
            policy = pipeline.policies.get(request.speculation.policy)
            exact = policy.lossless or request.params.temperature == 0
            if batch.lenience[index] < 1.0 or not exact:
                request.stats.lossless = False
            if scored and pipeline.oracle is None:
                request.stats.num_scored += scored[index]
        return [request.stats.num_tokens for request in batch.generating]

    def note_savings(self, num_before: Sequence[int]) -> None:
        """Record what the drafts of the step saved, once its tokens were appended.

        Args:
            num_before: number of tokens of each request before the step.
        """
        guard = self.pipeline.policies.guard
        unknown = None if any(self.outcome.num_drafted) else 0.0
        for request, before in zip(self.batch.generating, num_before, strict=True):
            gained = request.stats.num_tokens - before
            if gained:
                request.stats.add_saved(unknown if guard is None else guard.saved(gained))


class CostLearner:
    """Corrects the latency model with measured step times."""

    def __init__(self, latency: LatencyModel | None) -> None:
        """Set up.

        Args:
            latency: the model to correct; ``None`` if no policy needs step costs.
        """
        self._latency = latency
        self._num_timed = 0

    def observe(self, step: Step, times: StepTimes) -> None:
        """Learn from a step if it was typical. Call this before its tokens are appended."""
        if self._latency is None or not step.is_typical or times.disturbed:
            return
        self._num_timed += 1
        if self._num_timed > _WARM_UP and self._num_timed % _LEARN_EVERY:
            return
        draft = step.draft
        self._latency.observe_step(
            num_target_tokens=step.num_target_tokens,
            context=step.context,
            # With continuations beside a model, the time of drafting contains the search for them,
            # so these steps are left out.
            drafting=draft.drafting if draft.is_copied is None else (),
            num_scored=step.num_companion_tokens,
            # One-hot proposals have signals without any computation.
            has_signals=not isinstance(draft.signals, OneHotSignals | None),
            is_regular=len(set(step.plan.lengths)) == 1,
            target_seconds=times.total - times.draft - times.companion - times.select,
            draft_seconds=times.draft,
            companion_seconds=times.companion,
        )
