"""Measure the pass times of models on this machine, and check a stored latency profile."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import Models
from draftwise.errors import DraftwiseWarning, InvalidParameterError
from draftwise.profiling.interference import cores_of_both, measure_interference
from draftwise.profiling.latency_profile import LatencyProfile, Point
from draftwise.profiling.passes import PassShape, PassTimer, Stage, longest_context
from draftwise.profiling.shapes import Shapes, quick_shapes, thorough_shapes
from draftwise.values import integer

# Quick measurement: time budget in seconds for all models, fraction of the budget for the first
# measurement of every size, and repetitions of a size after that.
_BUDGET_SECONDS = 2.5
_FIRST_SWEEP_FRACTION = 0.6
_QUICK_REPEATS = 3
# Shorter passes are measured twice at once, because the first one touches new memory, which takes
# up to a tenth of a second.
_SHORT_PASS_SECONDS = 0.25
# Time budget in seconds for the first draft pass of a step.
_FIRST_DRAFT_SECONDS = 0.3
# Numbers of tokens that are measured regardless of the budget: the flat part of the curve and its
# end.
_REQUIRED_NUM_TOKENS = (1, 8, 32)
# Thorough measurement: number of sweeps over all shapes, and repetitions of a shape per sweep.
_NUM_SWEEPS = 2
_THOROUGH_REPEATS = 3
_CONTEXTS = (128, 512, 1024)
# Maximum number of sizes that are measured interleaved. The matrix library caches a limited number
# of compiled kernels, a few per number of tokens, and with more sizes it would recompile them
# during the measurement.
_MAX_INTERLEAVED_SIZES = 16
# A profile is stale if probe passes deviate from it by more than this factor.
_MAX_DEVIATION = 1.5
_NUM_PROBES = 3
_PROBED_TOKENS = 32

OnPass = Callable[[int, int], None]
_Pass = tuple[Stage, PassShape]


def measure_latency(
    models: Models, max_batch_size: int, num_speculative_tokens: int = 5
) -> LatencyModel:
    """Measure pass times of all models within a few seconds, for use when models are loaded.

    Sizes that do not fit in the time budget are extrapolated.

    Args:
        models: loaded models.
        max_batch_size: maximum number of requests that run at once.
        num_speculative_tokens: maximum number of tokens drafted per request and step.
    """
    gamma = max(1, num_speculative_tokens)
    longest = min(512, longest_context(models, gamma))
    timer = PassTimer(models, max_batch_size, longest, gamma)
    shapes = quick_shapes(timer.stages, max_batch_size, gamma, longest)
    points = _measure_quickly(timer, shapes)
    first_draft = _first_draft(timer, points, time.perf_counter() + _FIRST_DRAFT_SECONDS)
    return LatencyProfile.of(models, points, *first_draft).latency_model()


def measure_profile(
    models: Models,
    max_batch_size: int,
    contexts: Sequence[int] | None = None,
    num_speculative_tokens: int = 5,
    interference: bool = False,
    on_pass: OnPass | None = None,
) -> LatencyProfile:
    """Measure pass times over batch sizes, tokens per request and contexts, with repetitions.

    Args:
        models: loaded models.
        max_batch_size: largest batch.
        contexts: context tokens per request; ``None`` for 128, 512 and 1024 as far as they fit.
        num_speculative_tokens: maximum number of tokens verified per request.
        interference: also measure the slowdown of target and draft when both run at the same time.
            Requires a draft. Nothing is measured with an exit, which runs on the target.
        on_pass: called after every pass with the number of completed passes and of all passes.

    Raises:
        InvalidParameterError: a size is out of range, or the interference cannot be measured.
    """
    integer("max_batch_size", max_batch_size, 1)
    integer("num_speculative_tokens", num_speculative_tokens, 1)
    measures_interference = interference and not models.have_exit
    if measures_interference:
        cores_of_both()
    longest = longest_context(models, num_speculative_tokens)
    if contexts is None:
        contexts = [n for n in _CONTEXTS if n <= longest] or [longest]
    if not contexts or not all(1 <= context <= longest for context in contexts):
        raise InvalidParameterError(
            "contexts", f"must lie in 1 … {longest} for these models, got {list(contexts)}"
        )
    contexts = sorted(set(contexts))
    timer = PassTimer(models, max_batch_size, contexts[-1], num_speculative_tokens)
    shapes = thorough_shapes(timer.stages, max_batch_size, num_speculative_tokens, contexts)
    groups = [
        group
        for stage, of_stage in shapes.items()
        for group in _interleaved_groups(stage, of_stage)
    ]
    times: dict[_Pass, list[float]] = {each: [] for group in groups for each in group}
    total = _NUM_SWEEPS * (1 + _THOROUGH_REPEATS) * len(times)
    done = itertools.count(1)

    def run(each: _Pass) -> float:
        seconds = timer(*each)
        if on_pass is not None:
            on_pass(next(done), total)
        return seconds

    order = random.Random(0)
    for group in groups * _NUM_SWEEPS:
        for each in group:
            run(each)
        for _ in range(_THOROUGH_REPEATS):
            order.shuffle(group)
            for each in group:
                times[each].append(run(each))
    factors = {}
    if measures_interference:
        batches = sorted({1, max(1, max_batch_size // 4), max_batch_size})
        factors = measure_interference(timer, batches, num_speculative_tokens + 1, contexts[0])
    points = _points(times)
    profile = LatencyProfile.of(models, points, *_first_draft(timer, points, math.inf))
    return replace(profile, interference=factors)


def _first_draft(timer: PassTimer, points: Sequence[Point], deadline: float) -> tuple[float, int]:
    """What the first draft pass of a step takes beyond the others, and how many were timed.

    It is measured for the smallest batch only, as it hardly depends on the number of requests.

    Args:
        timer: times passes.
        points: measured passes.
        deadline: see :meth:`PassTimer.first_draft_extra`.
    """
    drafts = [point.shape for point in points if point.stage is Stage.DRAFT]
    if not drafts:
        return 0.0, 1
    smallest = min(drafts, key=lambda shape: shape.num_requests)
    return timer.first_draft_extra(smallest, deadline), timer.draft_depth


def load_latency(path: str, models: Models) -> LatencyModel:
    """Read a file written by ``draftwise profile-latency``.

    A few probe passes check whether the profile still describes the machine. If it does not, a
    :class:`DraftwiseWarning` is issued. The profile is still used, as live steps correct it.

    Args:
        path: path of the file.
        models: loaded models. They and this machine must match the profile.

    Raises:
        InvalidParameterError: the file does not exist, it is not a latency profile, or it was made
            with other models, another dtype or device, or another number of threads.
    """
    profile = LatencyProfile.load(path)
    profile.check(models)
    deviation = _deviation(profile, models)
    if not 1 / _MAX_DEVIATION <= deviation <= _MAX_DEVIATION:
        warnings.warn(
            f"latency_profile: passes take {deviation:.2g} times as long as {path!r} states; "
            "unless the machine is busy with other work, measure again with: "
            f"{profile.command(path)}",
            DraftwiseWarning,
            stacklevel=2,
        )
    return profile.latency_model()


def _measure_quickly(timer: PassTimer, shapes: Shapes) -> list[Point]:
    """Measure every size, smallest first, then repeat stage by stage within the budget.

    The shortest time counts, as first passes touch new memory and other work only delays a pass.
    """
    deadline = time.perf_counter() + _BUDGET_SECONDS
    first_deadline = deadline - (1 - _FIRST_SWEEP_FRACTION) * _BUDGET_SECONDS
    shortest: dict[_Pass, float] = {}

    def expected(each: _Pass) -> float:
        """Estimated seconds, scaled from the stage's largest measured pass that is not larger."""
        num_tokens = each[1].num_tokens
        seen = [(s.num_tokens, t) for (stage, s), t in shortest.items() if stage is each[0]]
        below = max(pair for pair in seen if pair[0] <= num_tokens)
        return below[1] * num_tokens / below[0]

    def measure(each: _Pass) -> None:
        shortest[each] = min(shortest.get(each, math.inf), timer(*each))

    def measure_first(each: _Pass) -> None:
        measure(each)
        if shortest[each] < _SHORT_PASS_SECONDS:
            measure(each)

    every = [(stage, shape) for stage, of_stage in shapes.items() for shape in of_stage]
    smallest = {(stage, of_stage[0]) for stage, of_stage in shapes.items()}
    every.sort(key=lambda each: each[1].num_tokens)
    needed = [e for e in every if e in smallest or e[1].num_tokens in _REQUIRED_NUM_TOKENS]
    for each in needed:
        measure_first(each)
    for each in every:
        if each not in shortest and time.perf_counter() + expected(each) < first_deadline:
            measure_first(each)

    order = random.Random(0)
    for stage in reversed(shapes):
        group = [each for each in shortest if each[0] is stage]
        for _ in range(_QUICK_REPEATS):
            order.shuffle(group)
            for each in group:
                if time.perf_counter() + shortest[each] < deadline:
                    measure(each)
    return _points({each: [seconds] for each, seconds in shortest.items()})


def _interleaved_groups(stage: Stage, shapes: Sequence[PassShape]) -> list[list[_Pass]]:
    """Group passes into lists that are measured interleaved, with a limited number of sizes."""
    sizes = sorted({shape.num_tokens for shape in shapes})
    groups = [
        sizes[i : i + _MAX_INTERLEAVED_SIZES] for i in range(0, len(sizes), _MAX_INTERLEAVED_SIZES)
    ]
    return [[(stage, s) for s in shapes if s.num_tokens in group] for group in groups]


def _points(times: Mapping[_Pass, Sequence[float]]) -> list[Point]:
    return [
        Point(stage, shape, statistics.median(seconds), len(seconds))
        for (stage, shape), seconds in sorted(times.items())
    ]


def _deviation(profile: LatencyProfile, models: Models) -> float:
    """Median ratio of the target's current pass times to those in the profile."""
    measured = [
        point
        for point in profile.points
        if point.stage is Stage.TARGET and point.shape.num_tokens <= _PROBED_TOKENS
    ]
    measured.sort(key=lambda point: (point.shape.context, point.shape.num_tokens))
    context = measured[0].shape.context
    measured = [point for point in measured if point.shape.context == context]
    probes = [measured[i * (len(measured) - 1) // (_NUM_PROBES - 1)] for i in range(_NUM_PROBES)]
    context = min(context, longest_context(models, 1))
    gamma = max(point.shape.num_tokens for point in probes)
    most = max(point.shape.num_requests for point in probes)
    draft = models.draft if models.have_exit else None
    timer = PassTimer(Models(models.target, draft), most, context, gamma)
    ratios = []
    for point in probes:
        shape = point.shape._replace(context=context)
        timer(Stage.TARGET, shape)
        ratios.append(timer(Stage.TARGET, shape) / point.seconds)
    return statistics.median(ratios)
