"""What a replica is told about its share of a step, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from draftwise.core.random import StageUniforms, StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import Draft, DraftRule, RuleNotes
from draftwise.engine.batch import Batch


@dataclass(frozen=True)
class TextChange:
    """How the text of a row differs from what the replica knows.

    Attributes:
        row: of the caches.
        is_new: whether another request has the row now.
        kept: tokens that stay.
        tail: tokens that follow.
        draft_length: tokens that are valid in the draft's cache.
        companion_length: likewise in the companion's.
    """

    row: int
    is_new: bool
    kept: int
    tail: list[int]
    draft_length: int
    companion_length: int


@dataclass(frozen=True)
class DraftShare:
    """Draft for some requests of a step.

    Attributes:
        texts: of all rows that take part.
        chunks: row, start and end of pieces of prompts.
        rows: of the requests that generate.
        limits: ``[rows]`` most tokens to draft.
        controls, history, uniforms: ``[rows]`` as of a batch.
        signals: whether the draft's signals are wanted.
        rule: says who stops before; ``None`` if nobody does.
    """

    texts: list[TextChange]
    chunks: list[tuple[int, int, int]]
    rows: list[int]
    limits: list[int]
    controls: LogitControls
    history: TokenHistory | None
    uniforms: StepUniforms | None
    signals: bool
    rule: DraftRule | None


@dataclass(frozen=True)
class Drafted:
    """The answer to a :class:`DraftShare`.

    Attributes:
        draft: in the order of its rows.
        notes: of the rule; ``None`` if there was none to follow: then everybody drafted to the
            limit.
        lengths: of the draft's cache, by row.
    """

    draft: Draft
    notes: RuleNotes | None
    lengths: dict[int, int]


@dataclass(frozen=True)
class JudgeShare:
    """Judge what was drafted last, as far as it was kept.

    Attributes:
        lengths: ``[rows]`` tokens of each draft that are to be judged; all 0 to read prompts only.
    """

    lengths: tuple[int, ...]


def part_of_batch(batch: Batch, indices: Sequence[int], rows: set[int]) -> Batch:
    """The part of a step that some requests are.

    Args:
        batch: the step.
        indices: of the requests among those that generate.
        rows: whose pieces of prompts belong to it.
    """
    at = torch.tensor(indices, dtype=torch.long)
    there = at.to(batch.controls.temperature.device)
    return Batch(
        chunks=[chunk for chunk in batch.chunks if chunk.request.row in rows],
        generating=[batch.generating[index] for index in indices],
        can_draft=[batch.can_draft[index] for index in indices],
        controls=batch.controls.rows(there),
        history=None if batch.history is None else batch.history.rows(there),
        uniforms=None if batch.uniforms is None else _part_of_uniforms(batch.uniforms, at),
        lenience=[batch.lenience[index] for index in indices],
    )


def part_of_rule(rule: DraftRule, indices: Sequence[int]) -> DraftRule:
    """The rule for some requests, with numbers of its own."""
    at = np.asarray(indices, dtype=np.int64)
    return replace(
        rule,
        greedy=rule.greedy[at],
        history=rule.history[at],
        exempt=rule.exempt[at],
        thresholds=rule.thresholds[at],
        notes=rule.notes.part(indices),
    )


def _part_of_uniforms(uniforms: StepUniforms, at: torch.Tensor) -> StepUniforms:
    stage = uniforms.stage
    return StepUniforms(
        uniforms.draft[at],
        uniforms.accept[at],
        uniforms.final[at],
        StageUniforms(stage.accept[at], stage.final[at]),
    )
