"""Loads the corpus that a configuration names, and saves one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.errors import InvalidParameterError
from draftwise.speculation import SpeculationConfig
from draftwise.values import numbered_lines

# Files with other endings are read as plain text.
_SAVED, _LINES = ".safetensors", ".jsonl"


def load_corpus(speculation: SpeculationConfig, tokenizer: Any) -> SuffixCorpus | None:
    """The corpus with all named documents; ``None`` if the configuration needs none.

    Raises:
        InvalidParameterError: a file cannot be read, or the target has no tokenizer; names
            ``corpus``.
    """
    if not speculation.corpus and not speculation.remember_outputs:
        return None
    corpus = SuffixCorpus(speculation.corpus_tokens)
    for name in speculation.corpus:
        path = Path(name)
        if tokenizer is None:
            raise InvalidParameterError("corpus", "the target has no tokenizer to read texts with")
        if path.suffix == _SAVED:
            corpus.load(path, tokenizer_fingerprint(tokenizer))
            continue
        for texts in read_texts(path, "corpus"):
            for text in texts:
                corpus.add(tokenizer(text, add_special_tokens=False).input_ids)
    return corpus


def save_corpus(corpus: SuffixCorpus | None, path: str, tokenizer: Any) -> None:
    """Write a corpus to a file.

    Args:
        corpus: the corpus; ``None`` without one.
        path: the file; its name must end with ``.safetensors``.
        tokenizer: the target's tokenizer.

    Raises:
        InvalidParameterError: there is no corpus or no tokenizer, or the file cannot be written.
    """
    if corpus is None:
        raise InvalidParameterError(
            "corpus", "there is none; set corpus or remember_outputs in SpeculationConfig"
        )
    if not path.endswith(_SAVED):
        raise InvalidParameterError("path", f"must end with {_SAVED}, got {path!r}")
    if tokenizer is None:
        raise InvalidParameterError(
            "corpus", "the target has no tokenizer, so a saved corpus could not be loaded again"
        )
    try:
        corpus.save(path, tokenizer_fingerprint(tokenizer))
    except (OSError, SafetensorError) as error:
        raise InvalidParameterError("path", f"cannot be written: {error}") from error


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of the vocabulary."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def read_texts(path: Path, field: str) -> Iterator[list[str]]:
    """The documents of a file or of all files in a folder.

    Args:
        path: a folder, a file of JSON lines (``.jsonl``), or a file of plain text.
        field: what the path is, for errors.

    Returns:
        For each file or each JSON line, its strings without the keys of objects.

    Raises:
        InvalidParameterError: a file cannot be read.
    """
    try:
        if path.is_dir():
            for each in sorted(path.rglob("*")):
                if each.is_file():
                    yield from read_texts(each, field)
            return
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(field, f"{str(path)!r} cannot be read: {error}") from error
    if path.suffix != _LINES:
        yield [content]
        return
    for number, line in numbered_lines(content):
        try:
            texts = list(_strings(json.loads(line)))
        except json.JSONDecodeError as error:
            raise InvalidParameterError(
                field, f"{str(path)!r}, line {number}, is not JSON: {error}"
            ) from error
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise InvalidParameterError(
                field, f"{str(path)!r}, line {number}, has an unpaired surrogate in a string"
            ) from error
        yield texts


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
