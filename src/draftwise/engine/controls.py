"""Sampling parameters of a batch as tensors, and the token history that penalties need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.params import SamplingParams


def batch_controls(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> LogitControls:
    """One row of controls per request; what nobody uses is left out.

    Args:
        params: ``[batch]``.
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def column(value: Callable[[SamplingParams], float], off: float) -> Tensor | None:
        values = [value(p) for p in params]
        if all(v == off for v in values):
            return None
        return torch.tensor(values, dtype=torch.float32, device=device)

    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    top_k = None
    if any(p.top_k for p in params):
        top_k = torch.tensor(
            [min(p.top_k, vocab_size) or vocab_size for p in params], device=device
        )
    bias = None
    if any(p.logit_bias for p in params):
        bias = torch.zeros(len(params), vocab_size, device=device)
        for row, p in enumerate(params):
            for token, value in p.logit_bias.items():
                bias[row, token] = value
    return LogitControls(
        temperature=temperature,
        all_greedy=all(p.temperature == 0 for p in params),
        any_greedy=any(p.temperature == 0 for p in params),
        top_k=top_k,
        top_p=column(lambda p: p.top_p, 1.0),
        min_p=column(lambda p: p.min_p, 0.0),
        repetition_penalty=column(lambda p: p.repetition_penalty, 1.0),
        presence_penalty=column(lambda p: p.presence_penalty, 0.0),
        frequency_penalty=column(lambda p: p.frequency_penalty, 0.0),
        bias=bias,
    )


class HistoryStore:
    """Which tokens each cache row has seen; allocated when the first penalty is asked for."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self.device = device
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def close(self) -> None:
        """Give the memory back."""
        self._seen = self._counts = None

    def begin(self, row: int, prompt_ids: Sequence[int]) -> None:
        """Start a row with a request's prompt."""
        if self._seen is None or self._counts is None:
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self.device)
            self._counts = torch.zeros(self._shape, device=self.device)
        self._seen[row] = False
        self._counts[row] = 0
        self._seen[row, torch.tensor(prompt_ids, device=self.device)] = True

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Count the tokens that a request gained."""
        if self._seen is None or self._counts is None:
            raise RuntimeError("append before begin")
        index = torch.tensor(tokens, device=self.device)
        self._seen[row, index] = True
        self._counts[row].index_add_(0, index, torch.ones(len(tokens), device=self.device))

    def rows(self, rows: Sequence[int]) -> TokenHistory:
        """The history of some rows; a row without penalties may hold anything."""
        if self._seen is None or self._counts is None:
            raise RuntimeError("rows before begin")
        index = torch.tensor(rows, device=self.device)
        return TokenHistory(self._seen[index], self._counts[index])


def history_along(
    history: TokenHistory, tokens: Tensor, lengths: Tensor, owner: Tensor, position: Tensor
) -> TokenHistory:
    """The history at each position of a draft: the request's, and the drafted tokens before it.

    Args:
        history: of the requests, ``[batch]``.
        tokens: ``[batch, width]`` int64 drafted tokens.
        lengths: ``[batch]`` int64, how many of them count.
        owner: ``[rows]`` request of each wanted row.
        position: ``[rows]`` its position in the draft.
    """
    steps = [history]
    for index in range(tokens.shape[1]):
        steps.append(steps[-1].after(tokens[:, index], index < lengths))
    seen = torch.stack([step.seen for step in steps], dim=1)
    counts = torch.stack([step.counts for step in steps], dim=1)
    return TokenHistory(seen[owner, position], counts[owner, position])
