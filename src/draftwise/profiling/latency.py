"""Measure what passes of the models cost on this machine; keep it in a file and read it back."""

from __future__ import annotations

import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import Models
from draftwise.errors import DraftwiseWarning, InvalidParameterError
from draftwise.profiling.fitting import Point
from draftwise.profiling.interference import measure_interference
from draftwise.profiling.latency_profile import LatencyProfile
from draftwise.profiling.passes import PassShape, PassTimer, Stage, longest_context
from draftwise.profiling.shapes import Shapes, quick_shapes, thorough_shapes

# Quick: seconds for all models; the share of it in which every size is tried once; how often a size
# is repeated then; and how long a pass may take, as a share of all, to be repeated at all.
_BUDGET_SECONDS = 2.5
_FIRST_SHARE = 0.6
_QUICK_REPEATS = 3
_LONG_PASS_SHARE = 0.02
# These many tokens are measured however long it takes: the flat part of the curve and its end.
_INDISPENSABLE = (1, 8, 32)
# Thorough: how often everything is gone through, and repeats of a shape each time.
_NUM_SWEEPS = 2
_THOROUGH_REPEATS = 3
_CONTEXTS = (128, 512, 1024)
# The matrix library keeps a limited number of compiled kernels, a few for each number of tokens: in
# turns with more sizes than this, it would be compiling that is measured.
_SIZES_IN_TURNS = 16
# A profile is stale when probes are off by more than this factor.
_MOST_OFF = 1.5
_NUM_PROBES = 3
_PROBED_TOKENS = 32

OnPass = Callable[[int, int], None]
_Pass = tuple[Stage, PassShape]


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
    interference: bool = False,
    on_pass: OnPass | None = None,
) -> LatencyProfile:
    """Time passes over batch sizes, tokens per request and contexts, each several times.

    Args:
        models: loaded.
        max_batch_size: largest batch.
        contexts: tokens of context per request; ``None`` for 128, 512 and 1024 as far as they fit.
        num_speculative_tokens: most tokens verified per request.
        interference: also measure how target and draft slow each other down; needs a draft.
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
    turns = [turn for stage, of_stage in shapes.items() for turn in _turns(stage, of_stage)]
    times: dict[_Pass, list[float]] = {each: [] for turn in turns for each in turn}
    total = _NUM_SWEEPS * (1 + _THOROUGH_REPEATS) * len(times)
    done = itertools.count(1)

    def run(each: _Pass) -> float:
        seconds = timer(*each)
        if on_pass is not None:
            on_pass(next(done), total)
        return seconds

    order = random.Random(0)
    for turn in turns * _NUM_SWEEPS:
        for each in turn:
            run(each)
        for _ in range(_THOROUGH_REPEATS):
            order.shuffle(turn)
            for each in turn:
                times[each].append(run(each))
    factors = {}
    if interference:
        batches = sorted({1, max(1, max_batch_size // 4), max_batch_size})
        factors = measure_interference(timer, batches, num_speculative_tokens + 1, contexts[0])
    return replace(LatencyProfile.of(models, _points(times)), interference=factors)


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
    return check_latency(LatencyProfile.load(path), path, models)


def check_latency(profile: LatencyProfile, path: str, models: Models) -> LatencyModel:
    """What a profile says passes cost, of a file that was read already; see :func:`load_latency`.

    Raises:
        InvalidParameterError: it was made with other models, another type or device, or another
            number of threads.
    """
    profile.check(models)
    off = _how_far_off(profile, models)
    if not 1 / _MOST_OFF <= off <= _MOST_OFF:
        warnings.warn(
            f"latency_profile: passes take {off:.2g} times as long as {path!r} says; if the "
            f"machine is not just busy, measure again with: {profile.command(path)}",
            DraftwiseWarning,
            stacklevel=3,
        )
    return profile.latency_model()


def _measure_quickly(timer: PassTimer, shapes: Shapes) -> list[Point]:
    """Every size once, the small ones first; then stage by stage in turns, while there is time."""
    deadline = time.perf_counter() + _BUDGET_SECONDS
    first_deadline = deadline - (1 - _FIRST_SHARE) * _BUDGET_SECONDS
    first: dict[_Pass, float] = {}

    def expected(each: _Pass) -> float:
        """Seconds, from the largest pass of the stage so far that is not larger."""
        num_tokens = each[1].num_tokens
        seen = [(s.num_tokens, t) for (stage, s), t in first.items() if stage is each[0]]
        below = max(pair for pair in seen if pair[0] <= num_tokens)
        return below[1] * num_tokens / below[0]

    every = [(stage, shape) for stage, of_stage in shapes.items() for shape in of_stage]
    smallest = {(stage, of_stage[0]) for stage, of_stage in shapes.items()}
    every.sort(key=lambda each: each[1].num_tokens)
    needed = [e for e in every if e in smallest or e[1].num_tokens in _INDISPENSABLE]
    for each in needed:
        first[each] = timer(*each)
    for each in every:
        if each not in first and time.perf_counter() + expected(each) < first_deadline:
            first[each] = timer(*each)

    repeated: dict[_Pass, list[float]] = {each: [] for each in first}
    order = random.Random(0)
    for stage in reversed(shapes):
        turn = [each for each in first if each[0] is stage]
        for _ in range(_QUICK_REPEATS):
            order.shuffle(turn)
            for each in turn:
                short = first[each] < _LONG_PASS_SHARE * _BUDGET_SECONDS
                if short and time.perf_counter() + first[each] < deadline:
                    repeated[each].append(timer(*each))
    return _points({each: repeated[each] or [seconds] for each, seconds in first.items()})


def _turns(stage: Stage, shapes: Sequence[PassShape]) -> list[list[_Pass]]:
    """Passes to be made in turns, with not too many different sizes in each list."""
    sizes = sorted({shape.num_tokens for shape in shapes})
    groups = [sizes[i : i + _SIZES_IN_TURNS] for i in range(0, len(sizes), _SIZES_IN_TURNS)]
    return [[(stage, s) for s in shapes if s.num_tokens in group] for group in groups]


def _points(times: Mapping[_Pass, Sequence[float]]) -> list[Point]:
    return [
        Point(stage, shape, statistics.median(seconds), len(seconds))
        for (stage, shape), seconds in sorted(times.items())
    ]


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
