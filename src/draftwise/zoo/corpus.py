"""Training corpus of the family, and its split into training and held-out documents.

There are five sources: the standard library of the running Python, its test suite, its language
reference (from ``pydoc``), the training questions of GSM8K, and the training tasks of MBPP. No
other file is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

GSM8K_FILE = "gsm8k_train.jsonl"
MBPP_FILE = "mbpp.jsonl"
# MBPP's own split: 11–510 test, 511–600 validation, 601–974 training.
MBPP_TRAINING_TASKS = range(601, 975)

HELD_OUT_PER_MYRIAD = 200
_CALCULATOR_ANNOTATION = re.compile(r"<<[^<>]*>>")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "pydoc_data"})
_MAX_DIGIT_SHARE = 0.2
_SECTION_CHARACTERS = 3_000


@dataclass(frozen=True)
class Document:
    """A text. Documents with the same ``key`` are on the same side of the split."""

    source: str
    key: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether the document is held out for validation (2 % of the documents are)."""
        digest = hashlib.sha256(self.key.encode("utf-8")).digest()
        return int.from_bytes(digest[:8], "big") % 10_000 < HELD_OUT_PER_MYRIAD


def _python_files(*, tests: bool) -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED_FOLDERS.intersection(parts):
            continue
        if bool(_TEST_FOLDERS.intersection(parts)) is not tests:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        # Skip character maps and generated tables, which consist mostly of digits.
        num_digits = sum(character.isdigit() for character in text)
        if len(text) >= 100 and num_digits <= _MAX_DIGIT_SHARE * len(text):
            yield text


def _standard_library(_: Path) -> Iterator[Document]:
    for text in _python_files(tests=False):
        yield Document("stdlib", text, text)


def _standard_library_tests(_: Path) -> Iterator[Document]:
    for text in _python_files(tests=True):
        yield Document("tests", text, text)


def _documentation(_: Path) -> Iterator[Document]:
    from pydoc_data.topics import topics

    # Whole topics are too few and too long for a split by hash.
    for name in sorted(topics):
        for text in _sections(topics[name].strip()):
            yield Document("docs", text, text)


def _sections(text: str) -> Iterator[str]:
    section = ""
    for paragraph in text.split("\n\n"):
        section += paragraph + "\n\n"
        if len(section) >= _SECTION_CHARACTERS:
            yield section
            section = ""
    if section:
        yield section


def _records(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def format_question(question: str, answer: str) -> str:
    """Return a question with its answer in the form of the family's chat template."""
    return f"Question: {question.strip()}\nAnswer: {answer.strip()}"


def _gsm8k(data: Path) -> Iterator[Document]:
    for record in _records(data / GSM8K_FILE):
        question = str(record["question"])
        answer = _CALCULATOR_ANNOTATION.sub("", str(record["answer"]))
        yield Document("gsm8k", question, format_question(question, answer))


def _mbpp(data: Path) -> Iterator[Document]:
    for record in _records(data / MBPP_FILE):
        if int(str(record["task_id"])) not in MBPP_TRAINING_TASKS:
            continue
        task = str(record["text"]).strip()
        code = str(record["code"]).replace("\r\n", "\n").expandtabs(4).strip()
        tests = record["test_list"]
        example = str(tests[0]) if isinstance(tests, list) and tests else ""
        # Each task has two forms: a script with a docstring, and a question with its answer.
        yield Document("mbpp", task, f'"""\n{task}\n{example}\n"""\n{code}\n')
        yield Document("mbpp", task, format_question(task, f"\n{code}"))


_READERS: Mapping[str, Callable[[Path], Iterator[Document]]] = MappingProxyType(
    {
        "stdlib": _standard_library,
        "tests": _standard_library_tests,
        "docs": _documentation,
        "gsm8k": _gsm8k,
        "mbpp": _mbpp,
    }
)
SOURCES = tuple(_READERS)


def read_documents(source: str, data: Path) -> Iterator[Document]:
    """Yield the documents of ``source`` in a stable order.

    ``data`` is the folder with ``gsm8k_train.jsonl`` and ``mbpp.jsonl``. The other sources are part
    of Python. Raises ``KeyError`` for an unknown source and ``FileNotFoundError`` for a missing
    file.
    """
    yield from _READERS[source](data)
