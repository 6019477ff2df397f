"""Drafts from the requests' texts instead of vLLM's n-grams (V2 model runner)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from draftwise.integrations.vllm.hooks import TextHooks
from draftwise.integrations.vllm.text_copies import TextCopies, device_tokens
from draftwise.integrations.vllm.text_steering import TextSteering
from draftwise.integrations.vllm.v2.step import SelectedDrafts, Step


class TextSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Replaces vLLM's speculator of the method ``ngram``.

    V2 keeps the texts on the device, so the new tokens of a step are copied to the host. vLLM
    verifies drafts without logits as one-hot proposals.

    Attributes:
        has_draft_model: always false.
        hooks: calls the policy.
        companion: always ``None``.
        skips_dummy_runs: has no effect, as there is nothing to run.
        num_speculative_tokens: maximum number of tokens drafted per step.
        selected_lengths: drafted tokens to verify of each request of the last step.
    """

    has_draft_model = False
    companion = None
    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any, steering: TextSteering
    ) -> None:
        """Set up.

        Args:
            vllm_config: a configuration with an ``ngram`` speculative config.
            device: the worker's device.
            runner: the V2 model runner.
            steering: drives the policy.
        """
        self.hooks = TextHooks(steering)
        self.skips_dummy_runs = False
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.selected_lengths: list[int] = []
        self._runner = runner
        self._device = device
        num_rows = vllm_config.scheduler_config.max_num_seqs
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._copies = TextCopies(num_rows, self._max_model_len)
        shape = num_rows, self.num_speculative_tokens
        self._drafts = torch.zeros(shape, dtype=torch.int64, device=device)

    def install(self) -> None:
        """Replace the model runner's speculator."""
        self._runner.speculator = self
        self._runner.draft_tokens_handler = SelectedDrafts(self._device, self)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """See vLLM; there are no graphs."""

    def capture(self) -> None:
        """See vLLM; there are no graphs."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Draft ``[batch, num_speculative_tokens]`` tokens.

        Only the leading :attr:`selected_lengths` tokens of each request are meaningful.
        """
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        limit = self.num_speculative_tokens
        if num_speculative_tokens is not None:
            limit = min(limit, num_speculative_tokens)
        step = Step.of(
            self._runner, input_batch, num_sampled, num_rejected, limit, self._max_model_len
        )
        stored = self._runner.req_states.all_token_ids.gpu
        rows = input_batch.idx_mapping_np.astype(np.int64)
        texts = self._copies.update(step.views, rows, device_tokens(stored))
        proposed = self.hooks.propose(step.views, step.verified, step.num_target_tokens, texts)
        self.selected_lengths = [len(tokens) for tokens in proposed]
        padded = np.zeros(tuple(drafts.shape), dtype=np.int64)
        for row, tokens in zip(padded, proposed, strict=True):
            row[: len(tokens)] = tokens
        drafts.copy_(torch.from_numpy(padded))
        return drafts
