"""Drafts that propose only the first tokens of their vocabulary.

The projection to the vocabulary is a large part of a small model. In a byte-level vocabulary ids
follow the order in which tokens were merged, so that the first ones are the frequent ones. A draft
that proposes a part of the vocabulary stays lossless, as its other tokens have q = 0 (Zhao et al.
2025, FR-Spec, arXiv 2502.14856, which chooses the tokens by counting them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from draftwise.checkpoints.quantization import StoredRows, keep_stored, stored_rows
from draftwise.errors import InvalidParameterError, UnsupportedModelError

FIELD = "draft_vocab_size"


def keep_first_tokens(model: Any, num_tokens: int, role: str) -> None:
    """Reduce a model's projection to the logits of its first tokens, in place.

    A projection that is tied to the embedding gets a weight of its own; the embedding is not
    changed, so that the model still reads all tokens.

    Args:
        model: a loaded model that is not packed or quantised yet.
        num_tokens: number of logits.
        role: the model's role; named in errors.

    Raises:
        InvalidParameterError: the model has no more tokens than these.
        UnsupportedModelError: its projection is not a linear layer.
    """
    whole = model.get_output_embeddings()
    if not isinstance(whole, nn.Linear):
        raise UnsupportedModelError(
            role, f"its projection to the vocabulary is no linear layer; leave out {FIELD}"
        )
    if num_tokens >= whole.out_features:
        raise InvalidParameterError(
            FIELD, f"must be less than the {whole.out_features} tokens of the {role}"
        )
    has_bias = whole.bias is not None
    first = nn.Linear(whole.in_features, num_tokens, has_bias, device="meta")
    first.weight = nn.Parameter(whole.weight.detach()[:num_tokens], requires_grad=False)
    if has_bias:
        first.bias = nn.Parameter(whole.bias.detach()[:num_tokens], requires_grad=False)
    stored = stored_rows(whole)
    if stored:
        keep_stored(first, first_rows(stored, num_tokens))
    model.set_output_embeddings(first)


def first_rows(stored: Sequence[StoredRows], num_rows: int) -> list[StoredRows]:
    """The first rows of parts that follow each other."""
    kept: list[StoredRows] = []
    for part in stored:
        count = min(len(part), num_rows)
        if count:
            kept.append(part.rows(0, count))
        num_rows -= count
    return kept
