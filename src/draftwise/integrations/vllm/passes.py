"""What passes cost inside vLLM, measured before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from draftwise.core.latency import StageCost

# So many rounds over all sizes are timed, after one in which memory and kernels are made ready.
# Sizes behind the first pass that takes longer than so many seconds are left out.
_ROUNDS, _LONG_SECONDS = 4, 0.5

_log = logging.getLogger(__name__)


class Proposer(Protocol):
    """The small models, whose passes are timed one by one."""

    num_speculative_tokens: int
    rests: bool

    def draft_pass(self, num_tokens: int) -> None:
        """One pass of the draft over so many requests."""

    def companion_pass(self, num_tokens: int) -> None:
        """One pass of the companion over so many tokens."""


class MeasuredCosts(NamedTuple):
    """Of one pass of each model.

    Attributes:
        target: over tokens verified and one of each request.
        draft: over requests.
        companion: over tokens judged; ``None`` where there is none.
    """

    target: StageCost
    draft: StageCost
    companion: StageCost | None


def measure_costs(runner: Any, proposer: Proposer, has_companion: bool) -> MeasuredCosts:
    """Time passes of each model as vLLM's warm-up runs them: without context, on memory of its own.

    Args:
        runner: vLLM's model runner, warmed up.
        proposer: whose small models are timed; nobody drafts meanwhile.
        has_companion: whether there is one.
    """
    num_requests = runner.scheduler_config.max_num_seqs
    drafted = num_requests * proposer.num_speculative_tokens
    most = min(runner.max_num_tokens, num_requests + drafted)
    proposer.rests = True
    try:
        target = timed(lambda n: runner._dummy_run(n, skip_eplb=True), sizes_up_to(most))
    finally:
        proposer.rests = False
    draft = timed(proposer.draft_pass, sizes_up_to(min(num_requests, most)))
    companion = None
    if has_companion:
        companion = timed(proposer.companion_pass, sizes_up_to(min(drafted, most)))
    _log.info(
        "draftwise: a target pass takes %.1f ms over one token and %.1f ms over %d",
        1e3 * target.seconds[0],
        1e3 * target.seconds[-1],
        target.tokens[-1],
    )
    return MeasuredCosts(target, draft, companion)


def timed(run: Callable[[int], object], sizes: Sequence[int]) -> StageCost:
    """What passes of some sizes take at best, made to rise.

    Args:
        run: makes a pass over so many tokens.
        sizes: ascending.
    """
    measured: list[int] = []
    for size in sizes:
        measured.append(size)
        if _seconds(run, size) > _LONG_SECONDS:
            break
    rounds = [[_seconds(run, size) for size in measured] for _ in range(_ROUNDS)]
    best = [min(of_size) for of_size in zip(*rounds, strict=True)]
    # A small pass takes no longer than a larger one: what does was disturbed.
    rising = tuple(accumulate(reversed(best), min))[::-1]
    return StageCost(tuple(float(size) for size in measured), rising)


def sizes_up_to(most: int) -> list[int]:
    """Powers of two, the numbers halfway between the larger ones, and ``most``."""
    powers = [1 << power for power in range(most.bit_length())]
    halfway = [power + power // 2 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *halfway) if size < most} | {most})


def _seconds(run: Callable[[int], object], size: int) -> float:
    _synchronise()
    start = time.perf_counter()
    run(size)
    _synchronise()
    return time.perf_counter() - start


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
