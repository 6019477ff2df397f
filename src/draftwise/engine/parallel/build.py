"""Builds the engine that the options of parallel drafting ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.parallel.overlap import OverlappedEngine, why_no_overlap
from draftwise.engine.parallel.replicas.replicated import (
    check_replicas,
    replicated_pipelines,
    start_replicas,
)
from draftwise.engine.turns import Turns
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.speculation import SpeculationConfig
from draftwise.values import integer, set_fields, shown


@dataclass(frozen=True)
class ParallelOptions:
    """How much of an engine runs at the same time. Without a draft model, nothing does.

    Attributes:
        overlap: draft for one half of the batch while the target verifies the other half; ``None``
            decides by the interference in the latency model.
        draft_replicas: number of processes that draft.

    Raises:
        InvalidParameterError: a value is out of range.
    """

    overlap: bool | None = None
    draft_replicas: int = 1

    def __post_init__(self) -> None:
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise InvalidParameterError(
                "overlap", f"must be true, false or None, got {shown(self.overlap)}"
            )
        set_fields(self, draft_replicas=integer("draft_replicas", self.draft_replicas, 1))


def build_engine(
    parallel: ParallelOptions,
    models: Models,
    speculation: SpeculationConfig | None,
    options: EngineOptions,
    latency: LatencyModel | None,
    profile: AcceptanceProfile | None,
    turns: Turns,
    on_status: Callable[[str], None],
) -> Engine:
    """Build an engine: a plain one, an overlapped one, or one with replicas of the draft.

    Args:
        parallel: what runs at the same time.
        models, speculation, options, latency, profile, turns: as in :class:`Engine`.
        on_status: called with a description of each operation that takes seconds.

    Raises:
        InvalidParameterError: the models or the settings cannot be combined with these options.
        DraftwiseError: a replica cannot load a model, or loads a different one.
    """
    if models.draft is None or speculation is None:
        return Engine(models, speculation, options, latency, profile, turns=turns)
    if parallel.draft_replicas > 1:
        if any(
            each is not None and each.model.recurrent for each in (models.draft, models.companion)
        ):
            raise InvalidParameterError(
                "draft_replicas", "a draft with recurrent layers runs in one process; set it to 1"
            )
        if parallel.overlap:
            raise InvalidParameterError(
                "overlap", "cannot be combined with draft_replicas; use one of them"
            )
        check_replicas(models, speculation)
        on_status(f"starting {parallel.draft_replicas - 1} replicas of the draft")
        replicas = start_replicas(parallel.draft_replicas, models, options.max_batch_size)
        return Engine(
            models,
            speculation,
            # The caches of replicas are in other processes.
            replace(options, caches_prefixes=False),
            latency,
            profile,
            turns=turns,
            pipelines=partial(replicated_pipelines, replicas),
        )
    parts = models, speculation, options, latency, profile, turns
    if parallel.overlap:
        return OverlappedEngine(*parts)
    interference = None if latency is None else latency.interference
    may_gain = parallel.overlap is None and interference is not None
    if may_gain and why_no_overlap(models, speculation) is None:
        return OverlappedEngine(*parts, interference)
    return Engine(models, speculation, options, latency, profile, turns=turns)
