"""The batch of a step: its requests, their sampling parameters and their token histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.engine.request import Request
from draftwise.params import SamplingParams
from draftwise.policies.base import RequestState


class PromptChunk(NamedTuple):
    """A chunk of a prompt that this step processes.

    Attributes:
        request: the request whose prompt it is.
        start: position of the chunk's first token.
        end: position after its last token.
    """

    request: Request
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        """Whether the request gets its first token from this step."""
        return self.end == len(self.request.tokens)


@dataclass(frozen=True)
class Batch:
    """The work of one step.

    Attributes:
        chunks: prompt chunks, in order of cache slot.
        generating: requests that gain tokens in this step, in order of cache slot. Their prompt was
            processed before the step, or is completed by a chunk of this step.
        can_draft: for each of ``generating``, whether its prompt was processed before the step.
        controls: sampling parameters of ``generating``.
        token_history: tokens of ``generating`` so far; ``None`` if no penalty needs them.
        uniforms: random numbers of ``generating``; ``None`` if all requests are greedy.
        lenience: lenience of each of ``generating``; 1 preserves the target's distribution exactly.
        expected_remaining: for each of ``generating``, the expected number of tokens until it ends,
            if no other request takes its place then; 0 if one does.
    """

    chunks: list[PromptChunk]
    generating: list[Request]
    can_draft: list[bool]
    controls: LogitControls
    token_history: TokenHistory | None
    uniforms: StepUniforms | None
    lenience: list[float]
    expected_remaining: list[float]

    @property
    def is_empty(self) -> bool:
        """Whether the step has no work."""
        return not self.chunks and not self.generating

    @property
    def wants_logprobs(self) -> bool:
        """Whether any request wants log-probabilities of its tokens."""
        return any(request.params.logprobs is not None for request in self.generating)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that the step processes."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def has_masks(self) -> bool:
        """Whether the next token of any request is restricted."""
        return any(request.is_masked for request in self.generating)

    def any_is_masked(self, indices: Iterable[int]) -> bool:
        """Whether the next token of any of the given requests is restricted."""
        return any(self.generating[index].is_masked for index in indices)

    def part(self, indices: Sequence[int], chunks: Sequence[PromptChunk]) -> Batch:
        """The part of the batch with the given requests.

        Args:
            indices: indices into ``generating``.
            chunks: prompt chunks that belong to the part.
        """
        host_indices = torch.tensor(indices, dtype=torch.long)
        device_indices = host_indices.to(self.controls.temperature.device)
        return Batch(
            chunks=list(chunks),
            generating=[self.generating[index] for index in indices],
            can_draft=[self.can_draft[index] for index in indices],
            controls=self.controls.rows(device_indices),
            token_history=None
            if self.token_history is None
            else self.token_history.rows(device_indices),
            uniforms=None if self.uniforms is None else self.uniforms.rows(host_indices),
            lenience=[self.lenience[index] for index in indices],
            expected_remaining=[self.expected_remaining[index] for index in indices],
        )

    def states(self, room: Callable[[Request], int]) -> list[RequestState]:
        """The state of each of ``generating`` that a policy sees.

        Args:
            room: the maximum number of tokens that the proposer can propose for a request.
        """
        return [
            request.state(request.draft_limit(room(request)) if can_draft else 0, remaining)
            for request, can_draft, remaining in zip(
                self.generating, self.can_draft, self.expected_remaining, strict=True
            )
        ]


def batch_controls(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> LogitControls:
    """One row of controls per request. Controls that no request uses are ``None``.

    Args:
        params: ``[batch]``.
        vocab_size: width of the logits.
        device: device of the logits.
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
    """The tokens seen in each cache slot. The first request with a penalty allocates memory."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self.device = device
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def close(self) -> None:
        """Release the memory."""
        self._seen = self._counts = None

    def begin(self, row: int, prompt_ids: Sequence[int]) -> None:
        """Reset a row to a request's prompt."""
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
        """The history of the given rows. Rows of requests without penalties are undefined."""
        if self._seen is None or self._counts is None:
            raise RuntimeError("rows before begin")
        index = torch.tensor(rows, device=self.device)
        return TokenHistory(self._seen[index], self._counts[index])


def token_history_along(
    token_history: TokenHistory, tokens: Tensor, lengths: Tensor, owner: Tensor, position: Tensor
) -> TokenHistory:
    """The history at each draft position: the request's tokens and the drafted tokens before it.

    Args:
        token_history: ``[batch]`` token histories of the requests.
        tokens: ``[batch, width]`` int64 drafted tokens.
        lengths: ``[batch]`` int64 draft lengths; tokens beyond them are ignored.
        owner: ``[rows]`` index of each row's request.
        position: ``[rows]`` each row's position in the draft.
    """
    steps = [token_history]
    for index in range(tokens.shape[1]):
        steps.append(steps[-1].after(tokens[:, index], index < lengths))
    seen = torch.stack([step.seen for step in steps], dim=1)
    counts = torch.stack([step.counts for step in steps], dim=1)
    return TokenHistory(seen[owner, position], counts[owner, position])
