"""The speculative part of a step: drafting, scoring, and selecting the tokens to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftwise.core.types import CompanionScores, Draft, Plan, StepTimes, TreeDraft
from draftwise.engine.batch import Batch
from draftwise.engine.companion import Companion
from draftwise.engine.lifecycle import FollowsRequests
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.proposers.base import Proposer
from draftwise.policies.router import PolicyRouter


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
