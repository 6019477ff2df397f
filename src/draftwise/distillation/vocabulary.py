"""The reduced vocabulary of a head: the tokens that the target writes most often."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwise.distillation.documents import Document


def choose_draft_tokens(
    documents: Sequence[Document], size: int, vocab_size: int, always: Iterable[int] = ()
) -> Tensor:
    """Choose the tokens that a head can propose.

    Tokens of answers come first, by frequency, then tokens of prompts, then the lowest ids, which
    are the most frequent ones in most vocabularies.

    Args:
        documents: training documents.
        size: number of tokens to choose; at least ``vocab_size`` chooses all tokens.
        vocab_size: the target's number of tokens.
        always: tokens that are always chosen, such as the end of a text.

    Returns:
        ``[min(size, vocab_size)]`` int64 ids of the target, ascending.
    """
    if size >= vocab_size:
        return torch.arange(vocab_size)
    # Prompts weigh less than any answer, but more than no occurrence.
    weights = torch.zeros(vocab_size, dtype=torch.float64)
    num_tokens = sum(len(each.tokens) for each in documents)
    for learned, weight in ((True, 1.0), (False, 0.5 / (1 + num_tokens))):
        chosen = [
            token
            for each in documents
            for token in (
                each.tokens[each.num_prompt_tokens :]
                if learned
                else each.tokens[: each.num_prompt_tokens]
            )
        ]
        counts = torch.bincount(torch.tensor(chosen, dtype=torch.long), minlength=vocab_size)
        weights += weight * counts
    for token in always:
        weights[token] = float("inf")
    order = torch.argsort(weights, descending=True, stable=True)
    return order[:size].sort().values


def coverage(documents: Sequence[Document], target_ids: Tensor) -> float:
    """Share of the tokens of answers and texts that a head can propose."""
    tokens = [token for each in documents for token in each.tokens[each.num_prompt_tokens :]]
    found = torch.isin(torch.tensor(tokens, dtype=torch.long), target_ids)
    return float(found.double().mean()) if tokens else 0.0
