"""Data of a draft for the bundled target: ``python -m draftwise.zoo.draft_data --data DIR -o OUT``.

Writes two files of JSON lines for ``draftwise train``: ``prompts.jsonl``, which the target answers,
and ``texts.jsonl``. Both come from the training documents of the family, and no held-out document
is among them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from draftwise.zoo.corpus import Document, read_documents

PROMPTS_FILE, TEXTS_FILE = "prompts.jsonl", "texts.jsonl"
_QUESTIONS = ("gsm8k", "mbpp")
_TEXTS = ("stdlib", "docs")
# A module of the standard library is cut, so that many of them fit into the files.
_LONGEST_TEXT = 6_000
_NUM_CHARACTERS = 3_500_000


def _training_documents(sources: Sequence[str], data: Path) -> Iterator[Document]:
    for source in sources:
        for document in read_documents(source, data):
            if not document.is_held_out:
                yield document


def prompts(data: Path) -> list[str]:
    """Return the training questions of GSM8K and tasks of MBPP, without their answers.

    Args:
        data: folder with ``gsm8k_train.jsonl`` and ``mbpp.jsonl``.

    Raises:
        FileNotFoundError: a file is missing.
    """
    return list(dict.fromkeys(document.key for document in _training_documents(_QUESTIONS, data)))


def texts(data: Path, num_characters: int, seed: int = 0) -> list[str]:
    """Return beginnings of modules of the standard library and sections of its documentation.

    Args:
        data: as for :func:`prompts`.
        num_characters: number of characters after which no further text is added.
        seed: chooses the texts and their order.
    """
    found = [document.text[:_LONGEST_TEXT] for document in _training_documents(_TEXTS, data)]
    random.Random(seed).shuffle(found)
    chosen, total = [], 0
    for text in found:
        if total >= num_characters:
            break
        chosen.append(text)
        total += len(text)
    return chosen


def _write(path: Path, key: str, values: Iterable[str]) -> None:
    lines = "".join(json.dumps({key: value}) + "\n" for value in values)
    path.write_text(lines, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m draftwise.zoo.draft_data", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K and MBPP")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--characters", type=int, default=_NUM_CHARACTERS, help="of texts (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    _write(arguments.output / PROMPTS_FILE, "prompt", prompts(arguments.data))
    _write(arguments.output / TEXTS_FILE, "text", texts(arguments.data, arguments.characters))


if __name__ == "__main__":
    main()
