"""What passes and signals cost: measured on this machine, or read from a file."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwise.core.stage_cost import StageCost
from draftwise.engine.assembly import Models
from draftwise.errors import InvalidParameterError
from draftwise.estimators.combined import Inputs, SignalModel
from draftwise.profiling.latency import measure_latency
from draftwise.profiling.passes import PassShape, PassTimer, longest_context
from draftwise.speculation import SpeculationConfig
from draftwise.studies.workbench import Workbench

# Batch sizes and context at which drafts are timed, and repetitions.
_BATCHES, _CONTEXT, _DRAFT_REPEATS = (1, 2, 4, 8, 16, 32, 64), 256, 6
# Rows of distributions over which a filter is timed, and repetitions.
_FILTER_ROWS = (1, 4, 16, 64)
_FILTER_REPEATS = 5
_DRAFTS = "draft", "draft_without_signals"


@dataclass(frozen=True)
class DraftTimes:
    """Seconds of the draft's passes of a step, by the number of requests that draft.

    A head that drafts blocks takes its time in the first one.

    Attributes:
        first: of the first token of a draft.
        later: of each further token.
    """

    first: StageCost
    later: StageCost


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the passes of a step.

    Attributes:
        target: of the target, by tokens; acceptance included.
        draft: of the draft with its signals.
        draft_without_signals: of the draft, if no signal is asked for.
        companions: of each companion, by scored tokens.
        keep: of applying a rule to whole distributions, by their number.
    """

    target: StageCost
    draft: DraftTimes
    draft_without_signals: DraftTimes
    companions: Mapping[str, StageCost]
    keep: StageCost

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON-compatible values."""
        return {
            "target": self.target.to_dict(),
            **{
                name: {part: cost.to_dict() for part, cost in vars(getattr(self, name)).items()}
                for name in _DRAFTS
            },
            "companions": {name: cost.to_dict() for name, cost in self.companions.items()},
            "keep": self.keep.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PassTimes:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: the values do not describe pass times.
        """

        def draft(name: str) -> DraftTimes:
            return DraftTimes(*(StageCost.from_dict(values[name][p]) for p in ("first", "later")))

        return cls(
            StageCost.from_dict(values["target"]),
            draft("draft"),
            draft("draft_without_signals"),
            {name: StageCost.from_dict(cost) for name, cost in values["companions"].items()},
            StageCost.from_dict(values["keep"]),
        )

    @classmethod
    def load(cls, path: Path, companions: list[str]) -> PassTimes:
        """Read a file that an earlier study wrote.

        Args:
            path: the file.
            companions: the companions whose times it must have.

        Raises:
            InvalidParameterError: the file has other content, or lacks a companion.
        """
        try:
            found = cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidParameterError(
                "pass_times",
                f"{str(path)!r} has no pass times ({type(error).__name__}: {error}); name a new "
                "file to measure them",
            ) from error
        missing = [name for name in companions if name not in found.companions]
        if missing:
            raise InvalidParameterError(
                "pass_times",
                f"{str(path)!r} has no times of {', '.join(missing)}; name a new file to measure "
                "them",
            )
        return found

    def save(self, path: Path) -> None:
        """Write the times to a file.

        Raises:
            InvalidParameterError: the file cannot be written.
        """
        try:
            text = json.dumps(self.to_dict(), indent=1) + "\n"
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidParameterError(
                "pass_times", f"cannot write {str(path)!r}: {error}"
            ) from error


def pass_times(bench: Workbench, companions: list[str]) -> PassTimes:
    """Read the file of the settings, or measure the times and write it.

    Args:
        bench: provides the timed models.
        companions: names of the companions.
    """
    path = bench.settings.pass_times
    if path is not None and path.exists():
        return PassTimes.load(path, companions)
    measured = _measure(bench, companions)
    if path is not None:
        measured.save(path)
    return measured


def _measure(bench: Workbench, companions: list[str]) -> PassTimes:
    s = bench.settings
    most, gamma = max(s.batch_sizes), s.num_speculative_tokens

    def models(companion: str | None) -> Models:
        policy = "fixed" if companion is None else "sv"
        config = SpeculationConfig(s.draft, companion=companion, policy=policy)
        return bench.large.load_models(config)

    bench.status("timing passes")
    target = measure_latency(Models(models(None).target), most, gamma).target
    drafts = _measure_drafts(models(None), most, gamma)
    of_companions = {}
    for name in companions:
        bench.status(f"timing passes of {name}")
        cost = measure_latency(models(name), most, gamma).companion
        assert cost is not None
        of_companions[name] = cost
    vocab_size = bench.large.target.model.vocab_size
    return PassTimes(target, drafts[0], drafts[1], of_companions, _keep(vocab_size))


def _measure_drafts(models: Models, most: int, gamma: int) -> tuple[DraftTimes, DraftTimes]:
    """The times of drafts with signals and without, in turns; the shortest of each size counts."""
    context = min(_CONTEXT, longest_context(models, gamma))
    timers = [PassTimer(models, most, context, gamma, signals) for signals in (True, False)]
    depth = timers[0].draft_depth
    sizes = sorted({*(size for size in _BATCHES if size < most), most})
    shortest: list[dict[tuple[int, int], float]] = [{}, {}]
    for size, _ in itertools.product(sizes, range(_DRAFT_REPEATS)):
        for length, (timer, best) in itertools.product(
            sorted({1, depth}), zip(timers, shortest, strict=True)
        ):
            seconds = timer.drafting_seconds(PassShape(size, size, context), length)
            best[size, length] = min(seconds, best.get((size, length), math.inf))

    def times(best: Mapping[tuple[int, int], float]) -> DraftTimes:
        first = [best[size, 1] for size in sizes]
        later = [(best[size, depth] - best[size, 1]) / max(1, depth - 1) for size in sizes]
        return DraftTimes(_rising(sizes, first), _rising(sizes, later))

    return times(shortest[0]), times(shortest[1])


def _rising(numbers: Sequence[int], seconds: Sequence[float]) -> StageCost:
    """A curve through measured times, which never falls."""
    rising = np.maximum.accumulate(np.maximum(seconds, 0.0))
    return StageCost(tuple(map(float, numbers)), tuple(rising.tolist()))


def _keep(vocab_size: int) -> StageCost:
    """The time to compute an estimate for every token, and to apply a threshold to it."""
    model, generator = SignalModel(Inputs.COMBINED), torch.Generator().manual_seed(0)
    seconds = []
    for rows in _FILTER_ROWS:
        q, c = (torch.rand(rows, vocab_size, generator=generator).softmax(dim=1) for _ in "qc")
        history, position = torch.full((rows,), 0.6), torch.zeros(rows, dtype=torch.long)
        entropy = torch.ones(rows)
        times = []
        for _ in range(_FILTER_REPEATS):
            start = time.perf_counter()
            log_odds = model.log_odds_over_vocabulary(q, entropy, history, position, c)
            q * (log_odds >= 0.0)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return _rising(_FILTER_ROWS, seconds)
