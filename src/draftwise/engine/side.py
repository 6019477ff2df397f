"""Who decides, drafts and judges for a batch, before the target is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwise.core.types import Draft, Judgement, Plan
from draftwise.engine.batch import Batch
from draftwise.engine.drafting import DraftSource
from draftwise.engine.judging import Judge
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.stopwatch import Stopwatch
from draftwise.policies.mixture import Mixture


@dataclass
class PreparedStep:
    """A step up to the target's pass.

    Attributes:
        side: that prepared it.
        clock: of the step.
        batch: who takes part.
        draft: what was written ahead.
        judgement: what the companion thinks of it; ``None`` where it was not asked.
        plan: what is verified.
    """

    side: Side
    clock: Stopwatch
    batch: Batch
    draft: Draft
    judgement: Judgement | None
    plan: Plan


class Side:
    """Policy, draft and companion with the state of one step.

    An engine that overlaps its models has two: what one prepared is verified while the other
    prepares.

    Attributes:
        policies: decide how much is drafted and verified.
    """

    def __init__(
        self,
        policies: Mixture,
        drafter: DraftSource,
        companion: Judge | None,
        oracle: TargetOracle | None = None,
    ) -> None:
        """Set up.

        Args:
            policies: decide how much is drafted and verified.
            drafter: writes ahead.
            companion: judges, if there is one.
            oracle: judges in its place, for a study.
        """
        self.policies = policies
        self._drafter = drafter
        self._companion = companion
        self._oracle = oracle

    @torch.inference_mode()
    def prepare(self, batch: Batch, clock: Stopwatch) -> PreparedStep:
        """Draft, judge and select."""
        draft = self._drafter.propose(batch, self.policies)
        clock.lap("draft")
        judgement = self._judge(batch, draft)
        clock.lap("companion")
        plan = self.policies.select(draft, judgement)
        clock.lap("select")
        return PreparedStep(self, clock, batch, draft, judgement, plan)

    def _judge(self, batch: Batch, draft: Draft) -> Judgement | None:
        """What the companion thinks of the draft, if there is one and the policy asks now."""
        if self._oracle is not None:
            return self._oracle.judgement(draft) if any(draft.lengths) else None
        if self._companion is None:
            return None
        if any(draft.lengths) and self.policies.wants_judgement():
            return self._companion.judge(batch, draft)
        self._companion.read_prompts(batch)
        return None
