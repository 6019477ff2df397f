"""Answer files in the format of Spec-Bench, for its evaluation scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftwise.benchmark.contenders import Turn
from draftwise.benchmark.contest import Cell, Result


def write_answers(
    folder: Path,
    cell: Cell,
    temperature: float,
    results: dict[str, Result],
    categories: Sequence[str],
    decode: Callable[[list[int]], str],
) -> None:
    """Write one file per contender: ``answers/WORKLOAD-TTEMPERATURE-BATCH-CONTENDER.jsonl``.

    Args:
        folder: folder of the report.
        cell: the cell that was run.
        temperature: temperature of all prompts.
        results: results by contender.
        categories: category of each prompt of the workload, by index.
        decode: function from token ids to text.
    """
    folder = folder / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        if not result.turns:
            continue
        run = f"{cell.workload}-T{temperature:g}-{cell.batch_size}"
        file_name = f"{run}-{name.replace(':', '').replace('/', '_')}.jsonl"
        lines = (
            json.dumps(record | {"model_id": name})
            for record in _records(cell, result, categories, decode)
        )
        (folder / file_name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _records(
    cell: Cell, result: Result, categories: Sequence[str], decode: Callable[[list[int]], str]
) -> Iterator[dict[str, Any]]:
    for ids, turn in zip(cell.question_ids, result.turns, strict=False):
        for place, question in enumerate(ids):
            yield {
                "question_id": question,
                "category": categories[question],
                "choices": [_choice(turn, place, decode)],
            }


def _choice(turn: Turn, place: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """One answer. ``wall_time`` is the time from the start of its batch to its completion."""
    answer = turn.answers[place]
    gains = turn.gains[place] if turn.gains else []
    return {
        "index": 0,
        "turns": [decode(answer)],
        "decoding_steps": [len(gains)],
        "new_tokens": [len(answer)],
        "wall_time": [turn.finished[place] if turn.finished else turn.seconds],
        "accept_lengths": gains,
    }
