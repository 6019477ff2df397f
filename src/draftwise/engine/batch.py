"""The batch of a step: its requests, their sampling parameters and their token histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.engine.request import Request
from draftwise.models.memory import upload
from draftwise.params import SamplingParams
from draftwise.policies.inputs import RequestState


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
        is_closed: whether no other request is expected before these have ended.
    """

    chunks: list[PromptChunk]
    generating: list[Request]
    can_draft: list[bool]
    controls: LogitControls
    token_history: TokenHistory | None
    uniforms: StepUniforms | None
    lenience: list[float]
    is_closed: bool = False

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

    @property
    def may_branch(self) -> bool:
        """Whether token trees may be verified: grammars and lenience apply to chains only."""
        return not self.has_masks and all(lenience == 1.0 for lenience in self.lenience)

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
            is_closed=self.is_closed,
        )

    def states(self, room: Callable[[Request], int], has_model: bool = True) -> list[RequestState]:
        """The state of each of ``generating`` that a policy sees.

        Args:
            room: the maximum number of tokens that the proposer can propose for a request.
            has_model: whether a draft model can draft.
        """
        return [
            request.state(
                request.draft_limit(room(request)) if can_draft else 0, self.is_closed, has_model
            )
            for request, can_draft in zip(self.generating, self.can_draft, strict=True)
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
    bias_tokens = bias_values = None
    largest = max((len(p.logit_bias) for p in params), default=0)
    if largest:
        tokens, values = np.zeros((len(params), largest), int), np.zeros((len(params), largest))
        for row, p in enumerate(params):
            tokens[row, : len(p.logit_bias)] = list(p.logit_bias)
            values[row, : len(p.logit_bias)] = list(p.logit_bias.values())
        bias_tokens = torch.from_numpy(tokens).to(device)
        bias_values = torch.from_numpy(values).float().to(device)
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
        bias_tokens=bias_tokens,
        bias_values=bias_values,
    )


class HistoryStore:
    """The distinct tokens seen in each cache slot, and how often the output has them."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        """Set up.

        Args:
            num_rows: number of cache slots.
            device: device of the histories that :meth:`rows` returns.
        """
        self.device = device
        self._places: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self._tokens = np.zeros((num_rows, 0), dtype=np.int64)
        self._counts = np.zeros((num_rows, 0), dtype=np.float32)

    def begin(self, row: int, prompt_ids: Sequence[int]) -> None:
        """Reset a row to a request's prompt, or to no tokens for a request without penalties."""
        distinct = list(dict.fromkeys(prompt_ids))
        self._reserve(len(distinct))
        self._places[row] = {token: place for place, token in enumerate(distinct)}
        self._tokens[row, : len(distinct)] = distinct
        self._counts[row] = 0

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Count the tokens that a request gained."""
        places = self._places[row]
        self._reserve(len(places) + len(tokens))
        for token in tokens:
            place = places.setdefault(token, len(places))
            self._tokens[row, place] = token
            self._counts[row, place] += 1

    def rows(self, rows: Sequence[int]) -> TokenHistory:
        """The history of the given rows. Rows of requests without penalties mean nothing."""
        lengths = np.array([len(self._places[row]) for row in rows])
        places = np.arange(lengths.max())
        places = np.where(places < lengths[:, None], places, 0)
        slots = np.array(rows)[:, None]
        return TokenHistory(
            upload(torch.from_numpy(self._tokens[slots, places]), torch.long, self.device),
            upload(torch.from_numpy(self._counts[slots, places]), torch.float32, self.device),
        )

    def _reserve(self, size: int) -> None:
        if size > self._tokens.shape[1]:
            wider = (0, 0), (0, size)
            self._tokens, self._counts = np.pad(self._tokens, wider), np.pad(self._counts, wider)


def token_history_along(
    token_history: TokenHistory, drafted: Tensor, owner: Tensor, position: Tensor
) -> TokenHistory:
    """The history at each draft position: the request's tokens and the drafted tokens before it.

    Args:
        token_history: ``[batch]`` token histories of the requests.
        drafted: ``[rows, width]`` int64 drafted tokens, those before each row's position first.
        owner: ``[rows]`` index of each row's request.
        position: ``[rows]`` each row's position in the draft.
    """
    along = token_history.rows(owner)
    for index, column in enumerate(drafted.unbind(dim=1)):
        along = along.after(column, index < position)
    return along
