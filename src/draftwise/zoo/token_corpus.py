"""The tokens of every source of the recipe, cached between the stages of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from draftwise.zoo.corpus import read_documents
from draftwise.zoo.recipe import END_OF_TEXT_ID
from draftwise.zoo.token_stream import TokenizedSource


@dataclass(frozen=True)
class Corpus:
    """Training and held-out parts of every source."""

    training: Mapping[str, TokenizedSource]
    held_out: Mapping[str, TokenizedSource]


def _encode(
    source: str, data: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[TokenizedSource, TokenizedSource]:
    parts: dict[bool, list[str]] = {False: [], True: []}
    for document in read_documents(source, data):
        parts[document.is_held_out].append(document.text)
    encoded = {
        held_out: [item.ids for item in tokenizer.backend_tokenizer.encode_batch(texts)]
        for held_out, texts in parts.items()
    }
    return (
        TokenizedSource.from_documents(encoded[False], END_OF_TEXT_ID),
        TokenizedSource.from_documents(encoded[True], END_OF_TEXT_ID),
    )


def load_corpus(
    runs: Path, data: Path | None, tokenizer: PreTrainedTokenizerFast, sources: tuple[str, ...]
) -> Corpus:
    """Tokenize ``sources``, or read the tokens cached in ``runs`` by a run with this tokenizer.

    Raises ``FileNotFoundError`` if there is no cache and ``data`` is None.
    """
    folder = runs / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True).encode("utf-8")
    fingerprint = hashlib.sha256(vocabulary).hexdigest()[:16]
    training: dict[str, TokenizedSource] = {}
    held_out: dict[str, TokenizedSource] = {}
    for source in sources:
        path = folder / f"{source}-{fingerprint}.npz"
        if not path.exists():
            if data is None:
                raise FileNotFoundError(f"{path}: run the training stage first")
            train_part, held_out_part = _encode(source, data, tokenizer)
            temporary = path.with_suffix(".tmp.npz")
            np.savez(
                temporary,
                tokens=train_part.tokens,
                starts=train_part.starts,
                held_out_tokens=held_out_part.tokens,
                held_out_starts=held_out_part.starts,
            )
            temporary.replace(path)
        with np.load(path) as arrays:
            training[source] = TokenizedSource(arrays["tokens"], arrays["starts"])
            held_out[source] = TokenizedSource(arrays["held_out_tokens"], arrays["held_out_starts"])
    return Corpus(training, held_out)
