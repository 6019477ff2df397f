"""Measurement of the costs of passes inside vLLM, before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import gt
from typing import Any, NamedTuple, Protocol

import torch

from draftwise.core.stage_cost import StageCost
from draftwise.integrations.vllm.agreement import Agreement

# Timed rounds over all sizes, after two passes of each size. The first pass of a size allocates
# memory and compiles kernels.
_ROUNDS = 4
# Sizes larger than the first one whose second pass takes longer than this are not measured.
_LONG_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Companion(Protocol):
    """A companion whose passes are timed."""

    def pass_without_context(self, num_tokens: int) -> None:
        """Run one pass over ``num_tokens`` tokens."""


class Drafter(Protocol):
    """The draft and the companion, whose passes are timed separately.

    Attributes:
        has_draft_model: whether a draft model drafts.
        companion: the companion; ``None`` without one.
        num_speculative_tokens: maximum number of tokens drafted per step.
        skips_dummy_runs: whether dummy runs do nothing, so that the target is timed alone.
    """

    has_draft_model: bool
    companion: Companion | None
    num_speculative_tokens: int
    skips_dummy_runs: bool

    def draft_pass(self, num_tokens: int) -> None:
        """Run one pass of the draft over ``num_tokens`` requests."""


class MeasuredCosts(NamedTuple):
    """Cost of one pass of each model.

    Attributes:
        target: by verified tokens plus one per request.
        draft: by requests; ``None`` without a draft model.
        companion: by scored tokens; ``None`` without a companion.
    """

    target: StageCost
    draft: StageCost | None
    companion: StageCost | None


def measure_costs(runner: Any, drafter: Drafter, agree: Agreement) -> MeasuredCosts:
    """Time the passes of each model, run as in vLLM's warm-up: without a context.

    Args:
        runner: vLLM's model runner, warmed up.
        drafter: the drafter with the draft and the companion.
        agree: makes decisions equal on all processes that run one model, as their passes wait for
            each other.
    """
    num_requests = runner.scheduler_config.max_num_seqs
    drafted = num_requests * drafter.num_speculative_tokens
    most = min(runner.max_num_tokens, num_requests + drafted)
    drafter.skips_dummy_runs = True
    try:
        target = timed(lambda n: runner._dummy_run(n, skip_eplb=True), sizes_up_to(most), agree)
    finally:
        drafter.skips_dummy_runs = False
    draft = companion = None
    if drafter.has_draft_model:
        draft = timed(drafter.draft_pass, sizes_up_to(min(num_requests, most)), agree)
    if drafter.companion is not None:
        run = drafter.companion.pass_without_context
        companion = timed(run, sizes_up_to(min(drafted, most)), agree)
    _log.info(
        "draftwise: a target pass takes %.1f ms over one token and %.1f ms over %d",
        1e3 * target.seconds[0],
        1e3 * target.seconds[-1],
        target.tokens[-1],
    )
    return MeasuredCosts(target, draft, companion)


def timed(run: Callable[[int], object], sizes: Sequence[int], agree: Agreement) -> StageCost:
    """The shortest times of passes, non-decreasing in their size.

    Args:
        run: runs a pass over the given number of tokens.
        sizes: numbers of tokens, ascending.
        agree: see :func:`measure_costs`.
    """
    measured: list[int] = []
    for size in sizes:
        measured.append(size)
        run(size)
        seconds = _seconds(run, size)
        if agree(partial(gt, seconds, _LONG_SECONDS)):
            break
    rounds = [[_seconds(run, size) for size in measured] for _ in range(_ROUNDS)]
    best = [min(of_size) for of_size in zip(*rounds, strict=True)]
    # A pass that was slower than a larger one was disturbed. It gets the larger one's time.
    rising = tuple(accumulate(reversed(best), min))[::-1]
    return StageCost(tuple(float(size) for size in measured), rising)


def sizes_up_to(most: int) -> list[int]:
    """Powers of two and, from 16 on, the midpoints between them, below ``most``; and ``most``."""
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
