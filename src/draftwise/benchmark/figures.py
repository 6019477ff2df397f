"""Compute the reported figures from the turns of a contest, as JSON-compatible values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwise.benchmark.contest import Cell, Result, num_identical, ratios
from draftwise.benchmark.recorder import StepRecords
from draftwise.benchmark.turns import spread
from draftwise.core.types import PARTS

# Shorter n-grams recur in ordinary text, above all in code and formulas.
NGRAM_TOKENS = 8


@dataclass(frozen=True)
class Parameters:
    """Sizes of the models, for the estimate of floating-point operations.

    Attributes:
        target: number of parameters of the target.
        draft: number of parameters of the draft; 0 without a draft.
        companion: number of parameters of the companion; 0 without a companion.
    """

    target: int
    draft: int = 0
    companion: int = 0


def figures_of_cell(
    cell: Cell,
    results: Mapping[str, Result],
    sizes: Mapping[str, Parameters],
    temperature: float,
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """All figures of one workload at one temperature and batch size.

    Args:
        cell: the cell that was run.
        results: results by contender.
        sizes: sizes of the models of each contender of Draftwise, by its name.
        temperature: temperature of all prompts. At 0 the answers are compared with those of
            target-only decoding.
        left_out: reasons of the contenders that did not run in this cell, by name.
    """
    contenders = {}
    for name, result in results.items():
        if not result.turns:
            contenders[name] = {"error": result.error or "did not run"}
            continue
        contenders[name] = _figures(dict(results), name, sizes, temperature == 0)
    return {
        "workload": cell.workload,
        "temperature": temperature,
        "batch_size": cell.batch_size,
        "rounds": len(cell.rounds),
        "prompts": len({index for each in cell.question_ids for index in each}),
        "contenders": contenders,
        "left_out": dict(left_out),
    }


def _figures(
    results: dict[str, Result], name: str, sizes: Mapping[str, Parameters], greedy: bool
) -> dict[str, Any]:
    result = results[name]
    figures: dict[str, Any] = {
        "tokens_per_second": spread(result.tokens_per_second),
        "ratio": spread(ratios(results, name)),
        "num_tokens": sum(turn.num_tokens for turn in result.turns),
        "seconds": sum(turn.seconds for turn in result.turns),
        "repeated_share": repeated_share(
            answer for turn in result.turns for answer in turn.answers
        ),
    }
    if result.error is not None:
        figures["error"] = result.error
    if greedy:
        same, first_differences = num_identical(results, name)
        figures["identical_answers"] = same
        figures["answers"] = sum(len(turn.answers) for turn in result.turns)
        figures["first_differences"] = first_differences
    records = result.records
    if records is not None:
        figures |= _of_steps(records)
        figures["flops_per_token"] = flops_per_token(records, sizes[name])
    return figures


def _of_steps(records: StepRecords) -> dict[str, Any]:
    steps, total = max(records.num_request_steps, 1), sum(records.seconds.values())
    longest = max(records.verified_lengths, default=0)
    return {
        "decode_tokens_per_second": records.decode_tokens / max(records.decode_seconds, 1e-12),
        "accepted_length": records.num_tokens / steps,
        "acceptance_rate": records.num_accepted / max(records.num_verified, 1),
        "drafted_per_step": records.num_drafted / steps,
        "scored_per_step": records.num_scored / steps,
        "verified_per_step": records.num_verified / steps,
        "step_seconds": total / max(records.num_steps, 1),
        "share_of_time": {part: records.seconds[part] / max(total, 1e-12) for part in PARTS},
        "acceptance_by_position": records.acceptance_by_position,
        "verified_lengths": [records.verified_lengths[n] for n in range(longest + 1)],
    }


def flops_per_token(records: StepRecords, sizes: Parameters) -> float:
    """Estimated floating-point operations per generated token, including prefill.

    The estimate is two operations per parameter and processed token, without attention. A model
    processes the prompt, the newest token of each step, and the drafted, scored or verified tokens.
    """
    if not records.num_tokens:
        return 0.0
    has_drafted = records.num_drafted > 0
    seen = records.num_prompt_tokens + records.num_request_steps
    target = sizes.target * (seen + records.num_verified)
    draft = sizes.draft * (seen + records.num_drafted) * has_drafted
    companion = sizes.companion * (records.num_prompt_tokens + records.num_scored)
    companion *= records.num_scored > 0
    return 2.0 * (target + draft + companion) / records.num_tokens


def repeated_share(answers: Iterable[Sequence[Hashable]], num_tokens: int = NGRAM_TOKENS) -> float:
    """Share of generated tokens that repeat earlier text of the same answer.

    A token counts as repeated if the n-gram that it completes, which is the token and those before
    it, occurred earlier in its answer. Occurrences may overlap, so that in a run of one token all
    tokens after the first n-gram are repeated. Tokens of the prompt do not count.

    Args:
        answers: generated tokens of each answer.
        num_tokens: length of the n-gram.

    Returns:
        The number of repeated tokens over that of all tokens; 0 without tokens.
    """
    repeated = total = 0
    for answer in answers:
        total += len(answer)
        seen = set()
        for end in range(num_tokens, len(answer) + 1):
            ngram = tuple(answer[end - num_tokens : end])
            repeated += ngram in seen
            seen.add(ngram)
    return repeated / total if total else 0.0
