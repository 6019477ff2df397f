"""vLLM's draft model, steered by a policy of ours (V2 model runner)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft
from draftwise.integrations.vllm.drafting import Drafting, Enough, drafted_requests
from draftwise.integrations.vllm.following import Integers
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import Member, verified_of
from draftwise.integrations.vllm.v2.companion import CompanionModel


class SteeredSpeculator(StandaloneARSpeculator):  # type: ignore[misc]
    """Drafts with vLLM's own loop and ends it where the policy says so.

    The loop asks for a token in :meth:`sample_draft`; there the policy is asked, and an exception
    leaves the loop when nobody goes on. The scheduler is told by :class:`ChosenDrafts` how many of
    a request's drafted tokens are to be verified.

    Attributes:
        drafting: asks the policy.
        companion: judges drafts; ``None`` for nobody.
        rests: whether a dummy run does nothing, so that the target can be timed alone.
        num_speculative_tokens: most tokens drafted per step.
        chosen: how many leading drafted tokens of each request of the last step to verify.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        runner: Any,
        steering: Steering,
        companion: CompanionModel | None,
    ) -> None:
        """Set up; models are not loaded yet.

        Args:
            vllm_config: with a ``draft_model`` speculative config.
            device: of the worker.
            runner: the V2 model runner.
            steering: with the policy.
            companion: judges drafts; ``None`` for nobody.
        """
        super().__init__(vllm_config, device)
        self.drafting = Drafting(steering)
        self.companion = companion
        self.rests = False
        self.num_speculative_tokens: int = self.num_speculative_steps
        self.chosen: list[int] = []
        self._runner = runner
        # Tokens drafted in this step; ``None`` in a dummy run, about which nobody is asked.
        self._num_drawn: int | None = None
        self._believed: Tensor | None = None

    def take_place(self) -> None:
        """Draft for the model runner from now on."""
        self._runner.speculator = self
        self._runner.draft_tokens_handler = ChosenDrafts(self.device, self)

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
        """Of both small models."""
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        if self.companion is not None:
            self.companion.set_attn(kv_cache_config, block_tables)

    def draft_pass(self, num_tokens: int) -> None:
        """One pass of the draft over so many requests, to be timed."""
        buffers = self.input_buffers
        ids, positions = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens]
        self._run_model(ids, positions, None, None, None)

    def companion_pass(self, num_tokens: int) -> None:
        """One pass of the companion over so many tokens, to be timed."""
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
        """``[batch, most]`` drafted tokens; of each request the leading :attr:`chosen` count."""

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
            return self.draft_tokens[:batch_size] if self.rests else draft()
        most = self.num_speculative_tokens
        if num_speculative_tokens is not None:
            most = min(most, num_speculative_tokens)
        seen = torch.stack([input_batch.seq_lens[:batch_size], num_sampled, num_rejected])
        seq_lens, sampled, rejected = seen.cpu().numpy().astype(np.int64)
        texts = seq_lens - rejected + (sampled > 0)  # the last sampled token was not read yet
        members = self._members(input_batch, texts, sampled, most)
        sent = input_batch.num_draft_tokens_per_req
        num_sent = [0] * batch_size if sent is None else sent.tolist()
        limit = self.drafting.begin(
            members,
            verified_of(input_batch.req_ids, num_sent, sampled.tolist()),
            int(input_batch.num_scheduled_tokens.sum()),
            _controls(temperature[input_batch.idx_mapping], members),
        )
        self._num_drawn, self.num_speculative_steps = 0, limit
        try:
            draft()
        except Enough:
            pass
        finally:
            self._num_drawn, self.num_speculative_steps = None, self.num_speculative_tokens

        def judge(drafted: Draft) -> Tensor:
            return self._judge(drafted, members, texts, input_batch)

        self.chosen = self.drafting.finish(None if self.companion is None else judge)
        result: Tensor = self.draft_tokens[:batch_size]
        return result

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
        """Draw as vLLM does, and ask the policy."""
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
            self.drafting.drawn(tokens, self._believed)
        return tokens

    def compute_draft_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        """As vLLM does; remembers what the draft thinks before a token is drawn."""
        logits: Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)
        if self._num_drawn is not None:
            self._believed = self.drafting.beliefs(logits)
        return logits

    def _members(
        self, input_batch: InputBatch, texts: Integers, sampled: Integers, most: int
    ) -> list[Member]:
        """The requests of the step, with what they just gained."""
        states, rows = self._runner.req_states, input_batch.idx_mapping_np
        temperatures = self._runner.sampler.sampling_states.temperature.np[rows]
        output = np.maximum(texts - states.prompt_len.np[rows], 0)
        ends = np.minimum(states.max_seq_len[rows], self.max_model_len)
        room = np.where(sampled > 0, np.clip(ends - texts - 1, 0, most), 0)
        return [
            Member(name, int(length), int(num_output), int(free), bool(temperature == 0))
            for name, length, num_output, free, temperature in zip(
                input_batch.req_ids, texts, output, room, temperatures, strict=True
            )
        ]

    def _judge(
        self, draft: Draft, members: list[Member], texts: Integers, input_batch: InputBatch
    ) -> Tensor:
        """What the companion thinks of a draft."""
        assert self.companion is not None
        names = [member.name for member in members]
        written, requests = self._runner.req_states.all_token_ids.gpu, input_batch.idx_mapping
        num_drawn = draft.tokens.shape[1]

        def there(values: Integers) -> Tensor:
            return torch.from_numpy(values).to(self.device)

        def tokens_at(owners: Integers, positions: Integers) -> Tensor:
            late = there(positions - texts[owners])
            rows, places = there(owners), there(positions).clamp(max=written.shape[1] - 1)
            of_draft = draft.tokens[rows, late.clamp(0, num_drawn - 1)]
            return torch.where(late < 0, written[requests[rows], places], of_draft).int()

        return self.companion.judge(
            drafted_requests(draft, names, texts), tokens_at, requests, names
        )


class ChosenDrafts(DraftTokensHandler):  # type: ignore[misc]
    """Tells the scheduler how many tokens of each request's draft to verify."""

    def __init__(self, device: torch.device, speculator: SteeredSpeculator) -> None:
        """Set up.

        Args:
            device: of the worker.
            speculator: says how many.
        """
        super().__init__(device)
        self._speculator = speculator

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """As vLLM does, with as many tokens of each request as were chosen."""
        drafts = super().get_draft_tokens()
        if drafts is None:
            return None
        tokens = [
            row[:count]
            for row, count in zip(drafts.draft_token_ids, self._speculator.chosen, strict=True)
        ]
        return DraftTokenIds(drafts.req_ids, tokens)


def _controls(temperature: Tensor, members: list[Member]) -> LogitControls:
    """Temperatures of a batch, 0 where a request is greedy; vLLM's draft knows no other setting."""
    greedy = [member.greedy for member in members]
    return LogitControls(temperature.float(), all(greedy), any(greedy))
