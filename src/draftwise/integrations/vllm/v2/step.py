"""A step of the V2 model runner: its requests, its results, and the drafts that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from draftwise.integrations.vllm.paged_cache import Integers
from draftwise.integrations.vllm.steps import RequestView, Verified, verified_by_request


@dataclass(frozen=True)
class Step:
    """The requests of a step, including the tokens that they just gained.

    Attributes:
        views: the requests.
        text_lengths: ``[batch]`` tokens of each request.
        verified: verification results of the requests that gained tokens.
        num_target_tokens: tokens in the target's pass, prompt tokens included.
    """

    views: list[RequestView]
    text_lengths: Integers
    verified: Mapping[str, Verified]
    num_target_tokens: int

    @classmethod
    def of(
        cls,
        runner: Any,
        input_batch: InputBatch,
        num_sampled: Tensor,
        num_rejected: Tensor,
        limit: int,
        max_model_len: int,
    ) -> Step:
        """Read the step from the model runner.

        Args:
            runner: the V2 model runner.
            input_batch: the batch of the target's pass.
            num_sampled, num_rejected: ``[batch]`` tokens that each request gained, and drafted
                tokens that were rejected.
            limit: maximum number of tokens to draft.
            max_model_len: maximum length of a text.
        """
        batch_size = input_batch.num_reqs
        counts = torch.stack([input_batch.seq_lens[:batch_size], num_sampled, num_rejected])
        seq_lens, sampled, rejected = counts.cpu().numpy().astype(np.int64)
        text_lengths = seq_lens - rejected + (sampled > 0)  # plus the token that was just sampled
        states, rows = runner.req_states, input_batch.idx_mapping_np
        temperatures = runner.sampler.sampling_states.temperature.np[rows]
        output = np.maximum(text_lengths - states.prompt_len.np[rows], 0)
        ends = np.minimum(states.max_seq_len[rows], max_model_len)
        room = np.where(sampled > 0, np.clip(ends - text_lengths - 1, 0, limit), 0)
        views = [
            RequestView(name, int(length), int(num_output), int(free), bool(temperature == 0))
            for name, length, num_output, free, temperature in zip(
                input_batch.req_ids, text_lengths, output, room, temperatures, strict=True
            )
        ]
        verified = input_batch.num_draft_tokens_per_req
        num_verified = [0] * batch_size if verified is None else verified.tolist()
        return cls(
            views,
            text_lengths,
            verified_by_request(input_batch.req_ids, num_verified, sampled.tolist()),
            int(input_batch.num_scheduled_tokens.sum()),
        )


class SelectsDrafts(Protocol):
    """A speculator whose drafts are selected by a policy.

    Attributes:
        selected_lengths: leading drafted tokens to verify of each request of the last step.
    """

    selected_lengths: list[int]


class SelectedDrafts(DraftTokensHandler):  # type: ignore[misc]
    """Passes only the selected tokens of each draft to the scheduler."""

    def __init__(self, device: torch.device, speculator: SelectsDrafts) -> None:
        """Set up.

        Args:
            device: the worker's device.
            speculator: provides the selected lengths.
        """
        super().__init__(device)
        self._speculator = speculator

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """See vLLM; returns only the selected tokens of each request."""
        drafts = super().get_draft_tokens()
        if drafts is None:
            return None
        tokens = [
            row[:count]
            for row, count in zip(
                drafts.draft_token_ids, self._speculator.selected_lengths, strict=True
            )
        ]
        return DraftTokenIds(drafts.req_ids, tokens)
