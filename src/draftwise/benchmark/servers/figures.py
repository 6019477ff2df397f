"""Figures of a cell of a benchmark of servers, as JSON-compatible values."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from draftwise.benchmark.figures import repeated_share
from draftwise.benchmark.servers.contenders import ServerContender
from draftwise.benchmark.servers.requests import Answered
from draftwise.benchmark.servers.run import Asked, Cell, ServerResult, ServerTurn
from draftwise.benchmark.turns import ratios_of_turns, spread

CELL_LABELS = ("workload", "temperature", "concurrency", "request_rate")
_PERCENTILES = {"median": 50, "p90": 90, "p99": 99}


def figures_of_servers(
    cell: Cell, contenders: Sequence[ServerContender], results: Mapping[str, ServerResult]
) -> dict[str, Any]:
    """All figures of one cell.

    Args:
        cell: the cell.
        contenders: the contenders; ratios are relative to the first.
        results: results by the name of the contender.
    """
    base = results[contenders[0].name]
    found: dict[str, Any] = {}
    for each in contenders:
        own = results[each.name]
        found[each.name] = _figures(cell, own, base) if own.turns else {"error": own.error}
    return {
        **cell.labels,
        "rounds": cell.rounds,
        "questions_per_turn": cell.num_requests,
        "baseline": contenders[0].name,
        "best_fixed": best_fixed(contenders, found),
        "contenders": found,
    }


def best_fixed(
    contenders: Sequence[ServerContender], figures: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """The fixed draft length of each server with the best median ratio, in hindsight.

    Args:
        contenders: the contenders.
        figures: figures by the name of the contender.

    Returns:
        Names of contenders by the name of their server, for servers with fixed lengths.
    """
    best: dict[str, str] = {}
    for each in contenders:
        if each.is_fixed and figures[each.name].get("ratio"):
            other = best.get(each.label)
            if other is None or _median(figures[each.name]) > _median(figures[other]):
                best[each.label] = each.name
    return best


def slower(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cells in which a contender was slower than the baseline, or failed.

    Returns:
        The labels of each cell, the name of the contender and the median of its ratio; 0 if it
        failed.
    """
    found = []
    for cell in cells:
        labels = {name: cell[name] for name in CELL_LABELS if name in cell}
        for name, own in cell["contenders"].items():
            ratio = _median(own) if own.get("ratio") else 0.0
            if name != cell["baseline"] and ratio < 1:
                found.append({**labels, "contender": name, "ratio": ratio})
    return found


def _median(figures: Mapping[str, Any]) -> float:
    return float(figures["ratio"]["median"])


def _figures(cell: Cell, result: ServerResult, base: ServerResult) -> dict[str, Any]:
    requests = [each for turn in result.turns for each in turn.requests]
    good = [each.answered for each in requests if each.answered.error is None]
    speeds = [_speed(cell, turn) for turn in result.turns]
    base_speeds = [_speed(cell, turn) for turn in base.turns]
    # Without tokens there is nothing to compare with.
    ratios = ratios_of_turns(speeds, base_speeds) if all(base_speeds) else []
    figures: dict[str, Any] = {
        "tokens_per_second": spread([turn.num_tokens / turn.seconds for turn in result.turns]),
        "ratio": spread(ratios),
        "requests": len(requests),
        "failed_requests": len(requests) - len(good),
        "refusals": sum(each.refused_seconds > 0 for each in good),
        "num_tokens": sum(each.num_tokens for each in good),
        "tokens_per_answer": spread([each.num_tokens for each in good]),
        "ttft_ms": _milliseconds(each.ttft_seconds for each in good),
        "tpot_ms": _milliseconds(each.tpot_seconds for each in good),
        # Words, as servers do not say which tokens they generated.
        "repeated_share": repeated_share(each.text.split() for each in good),
        **_acceptance(good),
    }
    if result.error is not None:
        figures["error"] = result.error
    if any(each.counts_chunks for each in good):
        figures["counts_chunks"] = True
    by_position = _acceptance_by_position(result.turns, good)
    if by_position:
        figures["acceptance_by_position"] = by_position
    if cell.temperature == 0:
        figures["same_texts"] = _num_same(result.turns, base.turns)
    figures["categories"] = _by_category(requests, base)
    return figures


def _speed(cell: Cell, turn: ServerTurn) -> float:
    """What ratios compare: tokens per second.

    Clients send as fast as they get answers, so the server's throughput counts. Requests that
    arrive at random set the throughput themselves, so the speed of an answer counts.
    """
    if cell.concurrency is not None:
        return turn.num_tokens / turn.seconds
    good = [each.answered for each in turn.requests if each.answered.num_tokens]
    return statistics.median(each.num_tokens / each.seconds for each in good) if good else 0.0


def _milliseconds(seconds: Iterable[float | None]) -> dict[str, float]:
    """Median and percentiles of times that are known."""
    known = [1e3 * each for each in seconds if each is not None]
    if not known:
        return {}
    return {name: float(np.percentile(known, at)) for name, at in _PERCENTILES.items()}


def _acceptance(answers: Sequence[Answered]) -> dict[str, float]:
    """Acceptance rate and accepted length of answers whose drafts the server has counted."""
    counted = [each for each in answers if each.num_verified is not None]
    if not counted:
        return {}
    verified = sum(each.num_verified or 0 for each in counted)
    accepted = sum(each.num_accepted for each in counted)
    tokens = sum(each.num_tokens for each in counted)
    # Every step generates one token beside those it accepts.
    return {
        "acceptance_rate": accepted / verified if verified else 0.0,
        "accepted_length": tokens / max(1, tokens - accepted),
        "num_verified": verified,
    }


def _acceptance_by_position(
    turns: Sequence[ServerTurn], answers: Sequence[Answered]
) -> dict[str, float]:
    """Acceptance by position, from 1, by the server's counts or by the answers' histograms."""
    counts = [turn.counts for turn in turns if turn.counts is not None]
    rates = reduce(add, counts).acceptance_by_position() if counts else {}
    histograms = [each.acceptance_histogram for each in answers if each.acceptance_histogram]
    if histograms and not rates:
        longest = max(map(len, histograms))
        padded = [each + (0,) * (longest - len(each)) for each in histograms]
        exactly = [sum(counts) for counts in zip(*padded, strict=True)]
        num_drafts, *at_least = reversed(list(accumulate(reversed(exactly))))
        rates = {at: count / num_drafts for at, count in enumerate(at_least) if num_drafts}
    return {str(at + 1): rate for at, rate in rates.items()}


def _num_same(turns: Sequence[ServerTurn], base: Sequence[ServerTurn]) -> int:
    """Answers with the text of the baseline's answer to the same request."""
    num_same = 0
    for own, other in zip(turns, base, strict=False):
        texts = {_place(each): each.answered for each in other.requests}
        for each in own.requests:
            theirs = texts.get(_place(each))
            if theirs is not None and theirs.error is None and each.answered.error is None:
                num_same += theirs.text == each.answered.text
    return num_same


def _place(asked: Asked) -> tuple[str, int]:
    return asked.question.question_id, asked.turn_of_user


def _by_category(requests: Sequence[Asked], base: ServerResult) -> dict[str, Any]:
    """Time per token and acceptance of each category, relative to the baseline's."""
    own = _categories(requests)
    theirs = _categories([each for turn in base.turns for each in turn.requests])
    found: dict[str, Any] = {}
    for name, answers in own.items():
        tpot = _milliseconds(each.tpot_seconds for each in answers)
        other = _milliseconds(each.tpot_seconds for each in theirs.get(name, ()))
        found[name] = {"requests": len(answers), "tpot_ms": tpot, **_acceptance(answers)}
        if tpot and other:
            found[name]["ratio"] = other["median"] / tpot["median"]
    return found


def _categories(requests: Iterable[Asked]) -> dict[str, list[Answered]]:
    found: dict[str, list[Answered]] = {}
    for each in requests:
        if each.answered.error is None:
            found.setdefault(each.question.category, []).append(each.answered)
    return found
