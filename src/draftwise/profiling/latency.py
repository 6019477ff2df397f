"""Measure what passes of the models cost on this machine."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from draftwise.core.latency import LatencyModel, StageCost
from draftwise.engine.engine import Models
from draftwise.errors import InvalidParameterError
from draftwise.models.attention import Segment
from draftwise.models.packed_model import PackedModel

_TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_REPEATS = 3
_CONTEXT = 64


def measure_latency(models: Models, max_batch_size: int) -> LatencyModel:
    """Time passes of all models for a few seconds."""
    most = 8 * max_batch_size
    return LatencyModel(
        _measure(models.target.model, most),
        None if models.draft is None else _measure(models.draft.model, max_batch_size),
        None if models.companion is None else _measure(models.companion.model, most),
    )


def load_latency(path: str, models: Models) -> LatencyModel:
    """Read a latency profile."""
    raise InvalidParameterError("latency_profile", f"cannot read {path!r}")


@torch.inference_mode()
def _measure(model: PackedModel, most: int) -> StageCost:
    sizes = [n for n in _TOKENS if n <= most] or [1]
    context = _CONTEXT
    cache = model.new_cache(1, context + sizes[-1])
    times: list[list[float]] = [[] for _ in sizes]
    for repeat in range(_REPEATS + 1):
        for index, size in enumerate(sizes):
            cache.truncate(0, 0)
            cache.advance(0, context)
            start = time.perf_counter()
            model.forward(cache, [0] * size, [Segment(0, context, size)], range(size))
            if repeat:
                times[index].append(time.perf_counter() - start)
    medians = np.maximum.accumulate([statistics.median(each) for each in times])
    return StageCost(tuple(sizes), tuple(medians))
