"""What the target itself thinks of the tokens that a step gained, for the requests that ask."""

from __future__ import annotations

from itertools import accumulate, islice

import torch
from torch import Tensor

from draftwise.core.types import Outcome, Plan
from draftwise.engine.batch import Batch
from draftwise.models.transfer import fetch, upload
from draftwise.outputs import TokenLogprobs


def token_logprobs(
    batch: Batch, plan: Plan, outcome: Outcome, logits: Tensor | None
) -> dict[int, list[TokenLogprobs]]:
    """Log-probabilities of every accepted token and of the one after them.

    Args:
        batch: the step.
        plan: what was verified.
        outcome: what the target made of it.
        logits: ``[rows, vocab]`` of the target, request after request one row per verified token
            and one after the last; ``None`` if no request gained tokens.

    Returns:
        By index of the requests that ask for them and did not fail.
    """
    asking = [
        index
        for index, request in enumerate(batch.generating)
        if request.params.logprobs is not None and index not in outcome.failed
    ]
    if logits is None or not asking:
        return {}
    planned = plan.tokens.tolist()
    first_rows = list(accumulate((length + 1 for length in plan.lengths), initial=0))
    rows: list[int] = []
    tokens: list[int] = []
    for index in asking:
        accepted = outcome.num_accepted[index]
        rows += range(first_rows[index], first_rows[index] + accepted + 1)
        tokens += [*planned[index][:accepted], outcome.next_tokens[index]]
    logp = logits[upload(rows, torch.long, logits.device)].float().log_softmax(dim=-1)
    own = logp.gather(1, upload(tokens, torch.long, logits.device).unsqueeze(1))
    rank = (logp > own).sum(dim=1) + 1
    most = max(_num_top(batch, index) for index in asking)
    values, best = logp.topk(min(most, logp.shape[1]), dim=1)
    told = zip(*(each.tolist() for each in fetch(own.squeeze(1), rank, best, values)), strict=True)
    return {
        index: [
            TokenLogprobs(
                logprob, place, tuple(zip(likely, numbers, strict=True))[: _num_top(batch, index)]
            )
            for logprob, place, likely, numbers in islice(told, outcome.num_accepted[index] + 1)
        ]
        for index in asking
    }


def _num_top(batch: Batch, index: int) -> int:
    """How many of the most likely tokens a request asks for."""
    return batch.generating[index].params.logprobs or 0
