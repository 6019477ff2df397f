"""Two half-batches: while the target verifies one, draft and companion work on the other.

Whether that pays is a question of the machine. A pass of half the batch costs the target more than
half the time where it is busy reading weights, and on a CPU the small models take their cores from
it. So it is done where the costs that were measured say so, or where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.engine.batch import Batch
from draftwise.engine.lanes import Lane, shares
from draftwise.engine.side import PreparedStep, Side
from draftwise.engine.stopwatch import Stopwatch
from draftwise.engine.verification import TargetVerifier
from draftwise.errors import InvalidParameterError

# Share of the time that must be gained: costs are known to a few per cent.
_LEAST_GAIN = 0.03
# Weight of the newest step in what steps look like.
_NEWEST = 0.1


@dataclass(frozen=True)
class Interference:
    """How many times as long a pass takes in its lane, beside the other, as alone on all cores.

    Attributes:
        target: of the target.
        draft: of the draft.
    """

    target: float
    draft: float


@dataclass(frozen=True)
class OverlapOptions:
    """When to draft for one half of the batch while the target verifies the other.

    Attributes:
        interference: what passes cost beside each other, to decide by; ``None`` for always.
    """

    interference: Interference | None = None


class Overlap:
    """Decides whether to overlap, and does it.

    Attributes:
        ahead: the half-batch that is prepared and waits for the target.
    """

    def __init__(self, latency: LatencyModel | None, interference: Interference | None) -> None:
        """Start two lanes.

        Args:
            latency: what passes cost alone.
            interference: what they cost beside each other; ``None`` to overlap in any case.

        Raises:
            InvalidParameterError: the machine has a single core.
        """
        cores = shares()
        if cores is None:
            raise InvalidParameterError(
                "overlap", "needs two cores, one for the target and one for the small models"
            )
        self.ahead: PreparedStep | None = None
        self._latency, self._interference = latency, interference
        self._large, self._small = (
            Lane(name, each) for name, each in zip(("target", "draft"), cores, strict=True)
        )
        self._tokens_each = 1.0
        self._context_each = 0.0
        self._drafting: list[float] = []

    def observe(self, num_tokens: int, context: int, lengths: Sequence[int]) -> None:
        """What a step of the whole batch looked like.

        Args:
            num_tokens: of the target.
            context: tokens behind its requests in all.
            lengths: tokens drafted for each request.
        """
        count = len(lengths)
        self._tokens_each += _NEWEST * (num_tokens / count - self._tokens_each)
        self._context_each = context / count
        depth = max(max(lengths, default=0), len(self._drafting))
        self._drafting += [0.0] * (depth - len(self._drafting))
        for place in range(depth):
            share = sum(length > place for length in lengths) / count
            self._drafting[place] += _NEWEST * (share - self._drafting[place])

    def pays(self, num_requests: int) -> bool:
        """Whether so many requests are better served in two halves."""
        if num_requests < 2:
            return False
        if self._interference is None or self._latency is None:
            return True
        target, draft = self._seconds(num_requests)
        half_target, half_draft = self._seconds(num_requests / 2)
        beside = max(half_target * self._interference.target, half_draft * self._interference.draft)
        return 2 * beside < (1 - _LEAST_GAIN) * (target + draft)

    def step(
        self, verifier: TargetVerifier, side: Side, batch: Batch, clock: Stopwatch
    ) -> tuple[PreparedStep | None, Tensor | None]:
        """Verify what is ahead, and prepare another batch meanwhile, which is ahead from then on.

        Args:
            verifier: with the target.
            side: that prepares, another one than that of what is ahead.
            batch: to be prepared; nobody in it is ahead.
            clock: of the new step.

        Returns:
            The step that was ahead, and its logits.
        """
        ahead = self.ahead
        small = self._small.submit(lambda: side.prepare(batch, clock))
        large: Future[Tensor | None] | None = None
        if ahead is not None:
            ahead.clock.start_again()
            large = self._large.submit(lambda: self._verified(verifier, ahead))
        try:
            logits = None if large is None else large.result()
        finally:  # whatever happens to one, the other is not left running
            self.ahead = None
            self.ahead = small.result()
        return ahead, logits

    def verify(self, verifier: TargetVerifier) -> tuple[PreparedStep, Tensor | None] | None:
        """Verify what is ahead and prepare nothing; ``None`` if nothing is."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return None
        ahead.clock.start_again()
        return ahead, self._verified(verifier, ahead)

    def abandon(self) -> None:
        """Forget what is ahead, once neither lane works on anything any more."""
        for lane in (self._large, self._small):
            lane.submit(lambda: None).result()
        self.ahead = None

    def close(self) -> None:
        """End the lanes."""
        self._large.close()
        self._small.close()

    @staticmethod
    @torch.inference_mode()
    def _verified(verifier: TargetVerifier, step: PreparedStep) -> Tensor | None:
        logits = verifier.verify(step.batch, step.plan)
        step.clock.lap("verify")
        return logits

    def _seconds(self, num_requests: float) -> tuple[float, float]:
        """Of the target's pass and of the draft's for so many requests, alone."""
        assert self._latency is not None
        target = self._latency.target_seconds(
            num_requests * self._tokens_each, num_requests * self._context_each
        )
        draft = sum(self._latency.draft_seconds(num_requests * each) for each in self._drafting)
        return target, draft
