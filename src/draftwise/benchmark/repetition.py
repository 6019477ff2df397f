"""Measurement of repetition in generated texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Shorter n-grams recur in ordinary text, above all in code and formulas.
NGRAM_TOKENS = 8


def repeated_share(answers: Iterable[Sequence[int]], num_tokens: int = NGRAM_TOKENS) -> float:
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
