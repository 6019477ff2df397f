"""The target's log-probabilities of generated tokens and of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

import torch
from torch import Tensor

from draftwise.core.types import Outcome, Plan
from draftwise.engine.batch import Batch
from draftwise.models.memory import fetch, upload
from draftwise.outputs import TokenLogprobs

# Rows of logits that are converted to float32 at once, to bound memory.
_ROWS_AT_ONCE = 64


def token_logprobs(
    batch: Batch, plan: Plan, outcome: Outcome, logits: Tensor | None
) -> dict[int, list[TokenLogprobs]]:
    """Log-probabilities of each request's accepted tokens and of the token after them.

    Args:
        batch: the step.
        plan: what was verified.
        outcome: the acceptance decisions.
        logits: ``[rows, vocab]`` logits of the target. Each request has one row per verified token
            and one row after the last. ``None`` if no request gained tokens.

    Returns:
        Log-probabilities by request index, for the requests that want them and did not fail.
    """
    wanting = [
        index
        for index, request in enumerate(batch.generating)
        if request.params.logprobs is not None and index not in outcome.failed
    ]
    if logits is None or not wanting:
        return {}
    planned = plan.host_tokens
    first_rows = list(accumulate((length + 1 for length in plan.lengths), initial=0))
    rows: list[int] = []
    tokens: list[int] = []
    for index in wanting:
        accepted = outcome.num_accepted[index]
        rows += range(first_rows[index], first_rows[index] + accepted + 1)
        tokens += [*planned[index][:accepted], outcome.next_tokens[index]]
    num_top = [batch.generating[index].params.logprobs or 0 for index in wanting]
    entries = _of_rows(logits[upload(rows, torch.long, logits.device)], tokens, max(num_top))
    return {
        index: [
            each if count == max(num_top) else replace(each, top=each.top[:count])
            for each in islice(entries, outcome.num_accepted[index] + 1)
        ]
        for index, count in zip(wanting, num_top, strict=True)
    }


def prompt_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> Iterator[TokenLogprobs]:
    """Log-probabilities of prompt tokens.

    Args:
        logits: ``[tokens, vocab]`` logits of the target at the position before each token.
        tokens: ``[tokens]`` prompt tokens.
        num_top: number of most likely tokens to report with each.
    """
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        yield from _of_rows(logits[some], tokens[some], num_top)


def _of_rows(logits: Tensor, tokens: Sequence[int], num_top: int) -> Iterator[TokenLogprobs]:
    """Log-probabilities of one token per row of logits."""
    logp = logits.float().log_softmax(dim=-1)
    own = logp.gather(1, upload(tokens, torch.long, logits.device).unsqueeze(1))
    rank = (logp > own).sum(dim=1) + 1
    values, best = logp.topk(min(num_top, logp.shape[1]), dim=1)
    entries = zip(
        *(each.tolist() for each in fetch(own.squeeze(1), rank, best, values)), strict=True
    )
    return (
        TokenLogprobs(logprob, place, tuple(zip(likely, numbers, strict=True)))
        for logprob, place, likely, numbers in entries
    )
