"""Measure what passes of the models cost on this machine; keep it in a file and read it back."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

from draftwise.core.latency import LatencyModel
from draftwise.engine.engine import Models
from draftwise.errors import DraftwiseWarning, InvalidParameterError
from draftwise.profiling.fitting import Point
from draftwise.profiling.latency_profile import LatencyProfile
from draftwise.profiling.passes import PassShape, PassTimer, Stage, longest_context
from draftwise.profiling.shapes import Shapes, quick_shapes, thorough_shapes

# Quick: seconds for all models, the share of it in which every size is tried once, and how often a
# size is measured at most.
_BUDGET_SECONDS = 2.5
_FIRST_SHARE = 0.7
_QUICK_PASSES = 3
# These many tokens are measured however long it takes: the flat part of the curve and its end.
_INDISPENSABLE = (1, 8, 32)
_THOROUGH_PASSES = 5
_CONTEXTS = (128, 512, 1024)
# A profile is stale when probes are off by more than this factor.
_MOST_OFF = 1.5
_NUM_PROBES = 3
_PROBED_TOKENS = 32

OnPass = Callable[[int, int], None]


def measure_latency(
    models: Models, max_batch_size: int, num_speculative_tokens: int = 5
) -> LatencyModel:
    """Time passes of all models for a few seconds at most, as when they are loaded.

    What a slow model has no time for is extrapolated.

    Args:
        models: loaded.
        max_batch_size: requests that run at once.
        num_speculative_tokens: most tokens drafted per step.
    """
    gamma = max(1, num_speculative_tokens)
    longest = min(512, longest_context(models, gamma))
    timer = PassTimer(models, max_batch_size, longest, gamma)
    shapes = quick_shapes(timer.stages, max_batch_size, gamma, longest)
    points = _measure_quickly(timer, shapes)
    return LatencyProfile.of(models, points).latency_model()


def measure_profile(
    models: Models,
    max_batch_size: int,
    contexts: Sequence[int] | None = None,
    num_speculative_tokens: int = 5,
    on_pass: OnPass | None = None,
) -> LatencyProfile:
    """Time passes over batch sizes, tokens per request and contexts, each several times.

    Args:
        models: loaded.
        max_batch_size: largest batch.
        contexts: tokens of context per request; ``None`` for 128, 512 and 1024 as far as they fit.
        num_speculative_tokens: most tokens verified per request.
        on_pass: called after every pass with the number of passes so far and in all.

    Raises:
        InvalidParameterError: a size is out of range.
    """
    for name, value, least in (
        ("max_batch_size", max_batch_size, 1),
        ("num_speculative_tokens", num_speculative_tokens, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidParameterError(name, f"must be a positive integer, got {value!r}")
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
    every = [(stage, shape) for stage, of_stage in shapes.items() for shape in of_stage]
    times: dict[tuple[Stage, PassShape], list[float]] = {each: [] for each in every}
    order = random.Random(0)
    total = (_THOROUGH_PASSES + 1) * len(every)
    for done in range(total):
        if done % len(every) == 0:
            order.shuffle(every)
        stage, shape = every[done % len(every)]
        times[stage, shape].append(timer(stage, shape))
        if on_pass is not None:
            on_pass(done + 1, total)
    return LatencyProfile.of(models, _points(times))


def load_latency(path: str, models: Models) -> LatencyModel:
    """Read a file of ``draftwise profile-latency``.

    A few passes are made to see whether the machine still is as it was; if not, it is said in a
    :class:`DraftwiseWarning` and the file is used all the same: live steps correct it.

    Args:
        path: the file.
        models: loaded; they and this machine must be those that were measured.

    Raises:
        InvalidParameterError: there is no such file, it is no latency profile, or it was made with
            other models, another type or device, or another number of threads.
    """
    profile = LatencyProfile.load(path)
    profile.check(models)
    off = _how_far_off(profile, models)
    if not 1 / _MOST_OFF <= off <= _MOST_OFF:
        warnings.warn(
            f"latency_profile: passes take {off:.2g} times as long as {path!r} says; if the "
            f"machine is not just busy, measure again with: {profile.command(path)}",
            DraftwiseWarning,
            stacklevel=2,
        )
    return profile.latency_model()


def _measure_quickly(timer: PassTimer, shapes: Shapes) -> list[Point]:
    """Every size once, the small ones first, and then in turns as long as there is time."""
    begin = time.perf_counter()
    times: dict[tuple[Stage, PassShape], list[float]] = {}

    def expected(stage: Stage, shape: PassShape) -> float:
        """From the pass of this stage that came nearest from below."""
        seen = [(s.num_tokens, times[at, s][-1]) for at, s in times if at is stage]
        below = max(each for each in seen if each[0] <= max(shape.num_tokens, seen[0][0]))
        return below[1] * max(1.0, shape.num_tokens / below[0])

    def fits(seconds: float, share: float) -> bool:
        return time.perf_counter() - begin + seconds <= share * _BUDGET_SECONDS

    every = [(stage, shape) for stage, of_stage in shapes.items() for shape in of_stage]
    first = {(stage, of_stage[0]) for stage, of_stage in shapes.items()}
    # Sorted by False before True: what is indispensable, then the others by size.
    wanted = [e for e in every if e in first or e[1].num_tokens in _INDISPENSABLE]
    others = sorted((e for e in every if e not in wanted), key=lambda e: e[1].num_tokens)
    for stage, shape in wanted:
        times[stage, shape] = [timer(stage, shape)]
    for stage, shape in others:
        if fits(expected(stage, shape), _FIRST_SHARE):
            times[stage, shape] = [timer(stage, shape)]
    order = random.Random(0)
    for _ in range(_QUICK_PASSES):
        turn = list(times)
        order.shuffle(turn)
        for stage, shape in turn:
            if fits(times[stage, shape][-1], 1.0):
                times[stage, shape].append(timer(stage, shape))
    return _points(times)


def _points(times: dict[tuple[Stage, PassShape], list[float]]) -> list[Point]:
    """Medians; the first pass of a shape warms up, if there is another."""
    points = []
    for (stage, shape), seconds in sorted(times.items()):
        counted = seconds[1:] or seconds
        points.append(Point(stage, shape, statistics.median(counted), len(counted)))
    return points


def _how_far_off(profile: LatencyProfile, models: Models) -> float:
    """Median ratio of the target's passes now to what the profile says."""
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
    timer = PassTimer(Models(models.target), most, context, gamma)
    ratios = []
    for point in probes:
        shape = point.shape._replace(context=context)
        timer(Stage.TARGET, shape)
        ratios.append(timer(Stage.TARGET, shape) / point.seconds)
    return statistics.median(ratios)
