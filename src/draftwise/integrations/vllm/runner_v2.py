"""Speculators for vLLM's V2 model runner: its draft model, or the texts, controlled by a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft
from draftwise.integrations.vllm.companion import CompanionModel
from draftwise.integrations.vllm.hooks import DraftHooks, StopDrafting
from draftwise.integrations.vllm.paged_cache import Integers
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, Verified, verified_by_request
from draftwise.integrations.vllm.text_drafts import TextCopies, Texts


class _Steered:
    """A speculator whose drafts are selected by a policy.

    Attributes:
        has_draft_model: whether a draft model drafts.
        hooks: calls the policy.
        companion: scores drafts; ``None`` without a companion.
        skips_dummy_runs: whether a dummy run does nothing, so that the target is timed alone.
        num_speculative_tokens: maximum number of tokens drafted per step.
        selected_lengths: leading drafted tokens to verify of each request of the last step.
        draft_tokens: ``[requests, num_speculative_tokens]`` int64 memory of the drafted tokens.
    """

    has_draft_model: bool
    draft_tokens: Tensor

    def _set_up(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: Any,
        steering: Steering,
        companion: CompanionModel | None,
    ) -> None:
        self.hooks = DraftHooks(steering)
        self.companion = companion
        self.skips_dummy_runs = False
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.selected_lengths: list[int] = []
        self._runner = runner
        self._handler = _SelectedDrafts(device, self)
        self._max_length: int = vllm_config.model_config.max_model_len
        self._copies = TextCopies(vllm_config.scheduler_config.max_num_seqs, self._max_length)

    def install(self) -> None:
        """Replace the model runner's speculator."""
        self._runner.speculator = self
        self._runner.draft_tokens_handler = self._handler

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
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Draft ``[batch, num_speculative_tokens]`` tokens.

        Only the leading :attr:`selected_lengths` tokens of each request are meaningful.
        """

        def draft(limit: int) -> None:
            self._draft_with_model(
                limit,
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                dummy_run=dummy_run,
                num_speculative_tokens=num_speculative_tokens,
                **options,
            )

        result = self.draft_tokens[: input_batch.num_reqs]
        if dummy_run:
            if not self.skips_dummy_runs:
                draft(self.num_speculative_tokens)
            return result
        limit = self.num_speculative_tokens
        if num_speculative_tokens is not None:
            limit = min(limit, num_speculative_tokens)
        step = _Step.of(
            self._runner, input_batch, num_sampled, num_rejected, limit, self._max_length
        )
        greedy = [view.greedy for view in step.views]
        limit = self.hooks.begin(
            step.views,
            step.verified,
            step.num_target_tokens,
            lambda: self._texts(step.views, input_batch),
            # vLLM's draft ignores all controls but the temperature.
            LogitControls(temperature[input_batch.idx_mapping].float(), all(greedy), any(greedy)),
        )
        draft(limit)

        def score(drafted: Draft) -> Tensor:
            companion = self.companion
            assert companion is not None
            return companion.score(
                drafted,
                [view.name for view in step.views],
                step.text_lengths,
                self._runner.req_states.all_token_ids.gpu,
                input_batch.idx_mapping,
                self._runner.block_tables.input_block_tables[companion.group][: len(step.views)],
            )

        self.selected_lengths = self.hooks.finish(None if self.companion is None else score)
        copies = self.hooks.steering.copies
        if copies:
            # Tokens after the selected ones have no meaning.
            width = max(map(len, copies.values()))
            padded = [own + [0] * (width - len(own)) for own in copies.values()]
            rows = torch.tensor(list(copies), device=result.device)
            result[rows, :width] = torch.tensor(padded, dtype=result.dtype, device=result.device)
        return result

    def _draft_with_model(self, limit: int, *inputs: Any, **options: Any) -> None:
        """Draft at most ``limit`` tokens for each request with the draft model, if there is one.

        Args:
            limit: the maximum number of tokens.
            *inputs, **options: the arguments of :meth:`propose`.
        """

    def _texts(self, views: list[RequestView], input_batch: InputBatch) -> Texts:
        """Copies of the texts, which this runner keeps on the device."""
        stored = self._runner.req_states.all_token_ids.gpu

        def tokens_at(rows: Integers, positions: Integers) -> NDArray[np.int32]:
            places = torch.from_numpy(np.stack([rows, positions])).to(stored.device)
            tokens: NDArray[np.int32] = stored[places[0], places[1]].cpu().numpy()
            return tokens

        return self._copies.update(views, input_batch.idx_mapping_np.astype(np.int64), tokens_at)


class SteeredSpeculator(_Steered, StandaloneARSpeculator):  # type: ignore[misc]
    """vLLM's speculator, whose drafting loop ends early and whose drafts are selected by a policy.

    vLLM's loop samples each token in :meth:`sample_draft`. The override calls the policy, and
    raises an exception to leave the loop when no request continues.
    """

    has_draft_model = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: Any,
        steering: Steering,
        companion: CompanionModel | None,
    ) -> None:
        """Set up without loading the models.

        Args:
            vllm_config: a configuration with a ``draft_model`` speculative config.
            device: the worker's device.
            runner: the V2 model runner.
            steering: drives the policy.
            companion: scores drafts; ``None`` without a companion.
        """
        super().__init__(vllm_config, device)
        self._set_up(vllm_config, device, runner, steering, companion)
        # Tokens drafted in this step; ``None`` in a dummy run, which does not involve the policy.
        self._num_drawn: int | None = None
        self._soft_probs: Tensor | None = None

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """Load the draft, then the companion."""
        draft = super().load_draft_model(target_model, target_attn_layer_names)
        if self.companion is not None:
            self.companion.load_model()
        return draft

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        *targets: Any,
    ) -> None:
        """Set up the attention of the draft and the companion."""
        super().set_attn(model_state, kv_cache_config, block_tables, *targets)
        if self.companion is not None:
            self.companion.set_attn(kv_cache_config)

    def draft_pass(self, num_tokens: int) -> None:
        """Run one pass of the draft over ``num_tokens`` requests, to be timed."""
        buffers = self.input_buffers
        ids, positions = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens]
        self._run_model(ids, positions, None, None, None)

    def _draft_with_model(self, limit: int, *inputs: Any, dummy_run: bool, **options: Any) -> None:
        self._num_drawn, self.num_speculative_steps = None if dummy_run else 0, limit
        try:
            StandaloneARSpeculator.propose(self, *inputs, dummy_run=dummy_run, **options)
        except StopDrafting:
            pass
        finally:
            self._num_drawn, self.num_speculative_steps = None, self.num_speculative_tokens

    def sample_draft(self, *inputs: Any, **options: Any) -> Tensor:
        """See vLLM; also gets the policy's decision which requests continue."""
        tokens: Tensor = super().sample_draft(*inputs, **options)
        if self._num_drawn is not None:
            self.draft_tokens[: len(tokens), self._num_drawn] = tokens
            self._num_drawn += 1
            self.hooks.drawn(tokens, self._soft_probs)
        return tokens

    def compute_draft_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        """See vLLM; also computes the draft's distribution for the policy."""
        logits: Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)
        if self._num_drawn is not None:
            self._soft_probs = self.hooks.soft_probabilities(logits)
        return logits


class TextSpeculator(_Steered, BaseSpeculator):  # type: ignore[misc]
    """Replaces vLLM's speculator of the method ``ngram``.

    V2 keeps the texts on the device, so the new tokens of a step are copied to the host. vLLM
    verifies drafts without logits as one-hot proposals.
    """

    has_draft_model = False
    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any, steering: Steering
    ) -> None:
        """Set up.

        Args:
            vllm_config: a configuration with an ``ngram`` speculative config.
            device: the worker's device.
            runner: the V2 model runner.
            steering: drives the policy.
        """
        self._set_up(vllm_config, device, runner, steering, None)
        shape = vllm_config.scheduler_config.max_num_seqs, self.num_speculative_tokens
        self.draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """See vLLM; there are no graphs."""

    def capture(self) -> None:
        """See vLLM; there are no graphs."""


@dataclass(frozen=True)
class _Step:
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
    ) -> _Step:
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


class _SelectedDrafts(DraftTokensHandler):  # type: ignore[misc]
    """Passes only the selected tokens of each draft to the scheduler."""

    def __init__(self, device: torch.device, speculator: _Steered) -> None:
        super().__init__(device)
        self._speculator = speculator

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """See vLLM; returns only the selected tokens of each request."""
        drafts = super().get_draft_tokens()
        if drafts is None:
            return None
        lengths = self._speculator.selected_lengths
        tokens = [row[:n] for row, n in zip(drafts.draft_token_ids, lengths, strict=True)]
        return DraftTokenIds(drafts.req_ids, tokens)
