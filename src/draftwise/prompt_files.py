"""Files of prompts, in JSON lines or Parquet, in the forms of published benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftwise.errors import PromptError
from draftwise.values import numbered_lines

# Spec-Bench, MT-Bench and SPEED-Bench use `turns`, HumanEval `prompt`, GSM8K `question`, MBPP
# `text`, and the files that SPEED-Bench's script prepares `messages`.
_KEYS = ("prompt", "question", "turns", "text", "messages")
_PARQUET = ".parquet"
# In SPEED-Bench's Parquet files, prompts of other data sets begin with this text.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Question:
    """A record of a file of prompts.

    Attributes:
        turns: one or more messages of the user.
        category: category that the record states; the file's name, without its suffix, if none.
        question_id: id that the record states; its number in the file, from 1, if none.
    """

    turns: tuple[str, ...]
    category: str
    question_id: str


def load_questions(
    path: str | Path, num_questions: int | None = None, field: str = "prompts"
) -> list[Question]:
    """Read a file of prompts.

    Args:
        path: file of JSON lines, or Parquet file (suffix ``.parquet``). Each record has the key
            ``prompt``, ``question``, ``turns`` (a list of texts), ``text`` or ``messages`` (those
            of a user).
        num_questions: maximum number of records to read; ``None`` for all.
        field: what errors name.

    Raises:
        PromptError: the file cannot be read, a record has no prompt, or the package that reads
            Parquet files is missing.
    """
    path = Path(path)
    records = _parquet_records if path.suffix == _PARQUET else _json_records
    questions = [
        _question(record, path, number, field)
        for number, record in islice(records(path, field), num_questions)
    ]
    if not questions:
        raise PromptError(field, f"{str(path)!r} contains no prompts")
    return questions


def _json_records(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """The records of a file of JSON lines, with the numbers of their lines."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, field, error) from error
    for number, line in numbered_lines(content):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(field, f"{path}:{number} is not JSON: {error}") from error


def _parquet_records(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """The records of a Parquet file, with their numbers."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise PromptError(
            field, f"reading {str(path)!r} needs pyarrow: pip install 'draftwise[parquet]'"
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors of malformed files are ValueErrors
        raise _unreadable(path, field, error) from error
    yield from enumerate(rows, start=1)


def _unreadable(path: Path, field: str, error: Exception) -> PromptError:
    return PromptError(field, f"cannot read {str(path)!r}: {error}")


def _question(record: Any, path: Path, number: int, field: str) -> Question:
    where = f"{path}:{number}"
    turns = _turns(record, where, field)
    for turn in turns:
        if turn.startswith(_PLACEHOLDER):
            raise PromptError(
                field,
                f"{where} has a placeholder in place of a prompt of another data set; "
                "SPEED-Bench's prepare.py fetches these prompts, and writes JSON lines",
            )
    stated = record.get("category"), record.get("question_id")
    category, question_id = (None if each is None else str(each) for each in stated)
    return Question(turns, category or path.stem, question_id or str(number))


def _turns(record: Any, where: str, field: str) -> tuple[str, ...]:
    """The user's turns of a record, by the first of the keys that has a text."""
    for key in _KEYS:
        value = record.get(key) if isinstance(record, dict) else None
        if key == "messages" and isinstance(value, list):
            value = [_content(message, where, field) for message in value]
        elif isinstance(value, str) and value:
            value = [value]
        elif key != "turns":
            value = None
        if isinstance(value, list) and value:
            if not all(isinstance(turn, str) and turn for turn in value):
                raise PromptError(field, f"{where} has a turn that is not a text")
            return tuple(value)
    raise PromptError(field, f"{where} has no text for any of the keys {', '.join(_KEYS)}")


def _content(message: Any, where: str, field: str) -> Any:
    """The content of a user's message."""
    if not isinstance(message, dict) or message.get("role") != "user":
        raise PromptError(
            field, f"{where} has a message that is not a user's; only those of users are asked"
        )
    return message.get("content")
