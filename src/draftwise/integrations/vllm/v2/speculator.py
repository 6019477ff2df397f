"""vLLM's draft model, controlled by a policy (V2 model runner)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft
from draftwise.integrations.vllm.hooks import DraftHooks, StopDrafting
from draftwise.integrations.vllm.paged_cache import Integers
from draftwise.integrations.vllm.scoring import drafted_requests
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView
from draftwise.integrations.vllm.text_copies import TextCopies, device_tokens
from draftwise.integrations.vllm.text_drafts import Texts
from draftwise.integrations.vllm.v2.companion import CompanionModel
from draftwise.integrations.vllm.v2.step import SelectedDrafts, Step


class SteeredSpeculator(StandaloneARSpeculator):  # type: ignore[misc]
    """vLLM's speculator, whose drafting loop ends early and whose drafts are selected by a policy.

    vLLM's loop samples each token in :meth:`sample_draft`. The override calls the policy, and
    raises an exception to leave the loop when no request continues. :class:`SelectedDrafts` passes
    the tokens to verify of each request to the scheduler.

    Attributes:
        has_draft_model: always true.
        hooks: calls the policy.
        companion: scores drafts; ``None`` without a companion.
        skips_dummy_runs: whether a dummy run does nothing, so that the target is timed alone.
        num_speculative_tokens: maximum number of tokens drafted per step.
        selected_lengths: leading drafted tokens to verify of each request of the last step.
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
        self.hooks = DraftHooks(steering)
        self.companion = companion
        self.skips_dummy_runs = False
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.selected_lengths: list[int] = []
        self._runner = runner
        # Tokens drafted in this step; ``None`` in a dummy run, which does not involve the policy.
        self._num_drawn: int | None = None
        self._soft_probs: Tensor | None = None
        self._copies: TextCopies | None = None

    def install(self) -> None:
        """Replace the model runner's speculator."""
        self._runner.speculator = self
        self._runner.draft_tokens_handler = SelectedDrafts(self.device, self)

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
        target_input_buffers: InputBuffers,
        target_attn_groups: Any,
    ) -> None:
        """Set up the attention of the draft and the companion."""
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        if self.companion is not None:
            self.companion.set_attn(kv_cache_config, block_tables)

    def draft_pass(self, num_tokens: int) -> None:
        """Run one pass of the draft over ``num_tokens`` requests, to be timed."""
        buffers = self.input_buffers
        ids, positions = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens]
        self._run_model(ids, positions, None, None, None)

    def companion_pass(self, num_tokens: int) -> None:
        """Run one pass of the companion over ``num_tokens`` tokens, to be timed."""
        assert self.companion is not None
        self.companion.pass_without_context(num_tokens)

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

        def draft() -> Tensor:
            drafted: Tensor = super(SteeredSpeculator, self).propose(
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
                dp_sync_state=dp_sync_state,
                dummy_run=dummy_run,
                skip_attn_for_dummy_run=skip_attn_for_dummy_run,
                mm_inputs=mm_inputs,
                is_profile=is_profile,
                num_speculative_tokens=num_speculative_tokens,
            )
            return drafted

        batch_size = input_batch.num_reqs
        if dummy_run:
            return self.draft_tokens[:batch_size] if self.skips_dummy_runs else draft()
        max_draft_length = self.num_speculative_tokens
        if num_speculative_tokens is not None:
            max_draft_length = min(max_draft_length, num_speculative_tokens)
        step = Step.of(
            self._runner,
            input_batch,
            num_sampled,
            num_rejected,
            max_draft_length,
            self.max_model_len,
        )
        limit = self.hooks.begin(
            step.views,
            step.verified,
            step.num_target_tokens,
            _controls(temperature[input_batch.idx_mapping], step.views),
            lambda: self._texts(step.views, input_batch),
        )
        self._num_drawn, self.num_speculative_steps = 0, limit
        try:
            draft()
        except StopDrafting:
            pass
        finally:
            self._num_drawn, self.num_speculative_steps = None, self.num_speculative_tokens

        def score(drafted: Draft) -> Tensor:
            return self._score(drafted, step.views, step.text_lengths, input_batch)

        self.selected_lengths = self.hooks.finish(None if self.companion is None else score)
        result: Tensor = self.draft_tokens[:batch_size]
        copies = self.hooks.steering.copies
        if copies:
            # Tokens after the selected ones have no meaning.
            width = max(map(len, copies.values()))
            padded = [own + [0] * (width - len(own)) for own in copies.values()]
            rows = torch.tensor(list(copies), device=result.device)
            result[rows, :width] = torch.tensor(padded, dtype=result.dtype, device=result.device)
        return result

    def _texts(self, views: list[RequestView], input_batch: InputBatch) -> Texts:
        """Copies of the texts, which this runner keeps on the device."""
        if self._copies is None:
            num_rows = self._runner.vllm_config.scheduler_config.max_num_seqs
            self._copies = TextCopies(num_rows, self.max_model_len)
        stored = self._runner.req_states.all_token_ids.gpu
        rows = input_batch.idx_mapping_np.astype(np.int64)
        return self._copies.update(views, rows, device_tokens(stored))

    def sample_draft(
        self,
        hidden_states: Tensor,
        sample_src_positions: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        draft_step: Tensor,
        draft_logits: Tensor | None,
        spec_step_idx: int = 0,
    ) -> Tensor:
        """See vLLM; also gets the policy's decision which requests continue."""
        tokens: Tensor = super().sample_draft(
            hidden_states,
            sample_src_positions,
            idx_mapping,
            temperature,
            seeds,
            draft_step,
            draft_logits,
            spec_step_idx,
        )
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

    def _score(
        self,
        draft: Draft,
        views: list[RequestView],
        text_lengths: Integers,
        input_batch: InputBatch,
    ) -> Tensor:
        """The companion's logits of a draft."""
        assert self.companion is not None
        names = [view.name for view in views]
        stored, requests = self._runner.req_states.all_token_ids.gpu, input_batch.idx_mapping
        num_drawn = draft.tokens.shape[1]

        def to_device(values: Integers) -> Tensor:
            return torch.from_numpy(values).to(self.device)

        def tokens_at(owners: Integers, positions: Integers) -> Tensor:
            index = to_device(positions - text_lengths[owners])
            rows, places = to_device(owners), to_device(positions).clamp(max=stored.shape[1] - 1)
            drafted = draft.tokens[rows, index.clamp(0, num_drawn - 1)]
            return torch.where(index < 0, stored[requests[rows], places], drafted).int()

        return self.companion.score(
            drafted_requests(draft, names, text_lengths), tokens_at, requests, names
        )


def _controls(temperature: Tensor, views: list[RequestView]) -> LogitControls:
    """The batch's temperatures, 0 for greedy requests. vLLM's draft ignores all other controls."""
    greedy = [view.greedy for view in views]
    return LogitControls(temperature.float(), all(greedy), any(greedy))
