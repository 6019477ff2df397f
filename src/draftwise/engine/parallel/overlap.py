"""Overlapped drafting: while the target verifies one half of the batch, the other half drafts.

Whether overlap saves time depends on the machine. If the target's pass is bound by memory
bandwidth, half the batch takes more than half the time. On a CPU, the small models also take cores
from the target. So halves overlap only if measured costs predict a gain, or if the user requires
it.

Source: Speculative Verification, section on hiding the companion's latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from draftwise.core.latency import Interference, LatencyModel
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.parallel.pinned_threads import PinnedThread, shares
from draftwise.engine.request import Request
from draftwise.engine.step import PreparedStep, Step, Stopwatch
from draftwise.engine.turns import Turns
from draftwise.engine.verification import Verified
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.policies import policy_class
from draftwise.speculation import SpeculationConfig

# Minimum fraction of the time to gain, because costs are only known to a few per cent.
_LEAST_GAIN = 0.03
# Weight of the newest step in the moving averages over steps.
_NEWEST = 0.1


def why_no_overlap(models: Models, speculation: SpeculationConfig) -> str | None:
    """What keeps the halves of a batch from overlapping; ``None`` if they can."""
    policy, device = policy_class(speculation.policy_name), models.target.model.device
    if shares() is None:
        return "needs two cores, one for the target and one for the small models"
    if device.type != "cpu":
        return f"supports models on the CPU only, not on {device.type!r}"
    if models.have_exit:
        return "leaves no target to an exit, which drafts or scores on the target itself"
    if policy.uses_target_oracle:
        return f"leaves no target to policy {policy.name!r}, which asks it while drafting"
    return None


class OverlapDecision:
    """Decides whether two overlapped halves are faster than the whole batch."""

    def __init__(self, latency: LatencyModel | None, interference: Interference | None) -> None:
        """Set up.

        Args:
            latency: cost of each pass when it runs alone.
            interference: slowdown of simultaneous passes; ``None`` to overlap always.
        """
        self._latency, self._interference = latency, interference
        self._tokens_each = 1.0
        self._context_each = 0.0
        self._drafting: list[float] = []

    def observe(
        self, num_tokens: int, context: int, num_requests: int, drafting: Sequence[int]
    ) -> None:
        """Update the averages from a step of the whole batch.

        Args:
            num_tokens: number of tokens that the target read.
            context: total number of tokens of all requests.
            num_requests: number of requests.
            drafting: as in :attr:`Draft.drafting`.
        """
        count = num_requests
        self._tokens_each += _NEWEST * (num_tokens / count - self._tokens_each)
        self._context_each = context / count
        depth = max(len(drafting), len(self._drafting))
        self._drafting += [0.0] * (depth - len(self._drafting))
        for place in range(depth):
            share = drafting[place] / count if place < len(drafting) else 0.0
            self._drafting[place] += _NEWEST * (share - self._drafting[place])

    def is_faster(self, num_requests: int) -> bool:
        """Whether two overlapped halves are faster for a batch of this size."""
        if num_requests < 2:
            return False
        if self._interference is None or self._latency is None:
            return True
        target, draft = self._seconds(num_requests)
        half_target, half_draft = self._seconds(num_requests / 2)
        simultaneous = max(
            half_target * self._interference.target, half_draft * self._interference.draft
        )
        return 2 * simultaneous < (1 - _LEAST_GAIN) * (target + draft)

    def _seconds(self, num_requests: float) -> tuple[float, float]:
        """Seconds of the target's pass and of the draft's passes, each running alone."""
        assert self._latency is not None
        target = self._latency.target_seconds(
            num_requests * self._tokens_each, num_requests * self._context_each
        )
        draft = sum(self._latency.draft_seconds(num_requests * each) for each in self._drafting)
        if self._drafting:
            share = min(1.0, num_requests * self._drafting[0])
            draft += share * self._latency.first_draft_extra
        return target, draft


class OverlappedEngine(Engine):
    """An engine that may prepare one half of the batch while the target verifies the other.

    A request's cache slot decides its half. Each half has its own pipeline. If overlap saves no
    time, steps are those of :class:`Engine` and use the first pipeline.
    """

    def __init__(
        self,
        models: Models,
        speculation: SpeculationConfig,
        options: EngineOptions | None = None,
        latency: LatencyModel | None = None,
        profile: AcceptanceProfile | None = None,
        turns: Turns | None = None,
        interference: Interference | None = None,
    ) -> None:
        """Set up.

        Args:
            models: the loaded models, including a draft model.
            speculation, options, latency, profile, turns: as in :class:`Engine`.
            interference: slowdown of simultaneous passes, by which each step decides whether to
                overlap; ``None`` to overlap always.

        Raises:
            InvalidParameterError: the halves cannot overlap; see :func:`why_no_overlap`.
        """
        obstacle = why_no_overlap(models, speculation)
        if obstacle is not None:
            raise InvalidParameterError("overlap", obstacle)
        cores = shares()
        assert cores is not None
        super().__init__(
            models,
            speculation,
            options,
            latency,
            profile,
            turns=turns,
            pipelines=lambda parts: parts.pipelines(2),
        )
        self.overlap = OverlapDecision(latency, interference)
        self._large, self._small = (
            PinnedThread(name, each) for name, each in zip(("target", "draft"), cores, strict=True)
        )
        self._ahead: PreparedStep | None = None
        self._advanced: list[Request] = []

    def _advance(self) -> list[Request]:
        """Advance the requests of one half, or every request."""
        if self.overlap.is_faster(self._scheduler.num_running):
            advanced = self._half_step()
        else:
            advanced = self._whole_step()
        finished, self._advanced = self._advanced, []
        # A request of a half that was finished early may have advanced again.
        return list({each.request_id: each for each in [*finished, *advanced]}.values())

    def _whole_step(self) -> list[Request]:
        """Finish the prepared half, and advance every request."""
        self._finish_ahead()
        return super()._advance()

    def _half_step(self) -> list[Request]:
        """Verify the prepared half while the other half drafts."""
        ahead, clock = self._ahead, Stopwatch()
        half = 0 if ahead is None else 1 - self._pipelines.index(ahead.pipeline)
        batch = self._scheduler.next_batch(
            self.lenience, lambda request: request.cache_slot % 2 == half
        )
        clock.lap("rest")
        if batch.is_empty:
            return self._whole_step()
        pipeline = self._pipelines[half]
        small = self._small.submit(
            torch.inference_mode()(lambda: self._prepare(pipeline, batch, clock))
        )
        large: Future[Verified] | None = None
        if ahead is not None:
            ahead.clock.start_again()
            large = self._large.submit(torch.inference_mode()(lambda: self._verify(ahead)))
        try:
            verified = None if large is None else large.result()
        finally:  # if one thread fails, wait for the other one
            self._ahead = None
            self._ahead = small.result()
        if ahead is None or verified is None:
            return []
        return self._accept(ahead, verified)

    @torch.inference_mode()
    def _finish_ahead(self) -> None:
        """Finish the prepared half, so that all requests are between two steps."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        ahead.clock.start_again()
        try:
            self._advanced += self._accept(ahead, self._verify(ahead))
        except BaseException as error:
            self._recover(error)
            raise

    def change_speculation(self, **changes: Any) -> SpeculationConfig:
        """As in :class:`Engine`; the prepared half ends as it was drafted."""
        with self.turns:
            self._finish_ahead()
            return super().change_speculation(**changes)

    def _cancel(self, requests: Sequence[Request]) -> None:
        if any(request.finish_reason is None for request in requests):
            try:
                self._finish_ahead()
            except Exception:  # it has ended all requests, which report it
                return
        super()._cancel(requests)

    def _commit(self, step: Step) -> list[Request]:
        if step.is_typical and not step.clock.has_paused:
            count, drafting = len(step.batch.generating), step.draft.drafting
            self.overlap.observe(step.num_target_tokens, step.context, count, drafting)
        return super()._commit(step)

    def _recover(self, error: BaseException) -> None:
        self._abandon()
        super()._recover(error)

    def _abandon(self) -> None:
        """Wait until both threads are idle, and discard the prepared half."""
        for thread in (self._large, self._small):
            thread.submit(lambda: None).result()
        self._ahead = None

    def _close(self) -> None:
        self._abandon()
        super()._close()
        self._large.close()
        self._small.close()
