"""The companion: a third model inside vLLM that scores drafts (V1 model runner)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from draftwise.integrations.vllm.companion import as_draft
from draftwise.integrations.vllm.paged_cache import (
    DraftedRequests,
    Integers,
    PackedSpans,
    slot_mapping,
)
from draftwise.integrations.vllm.scoring import DraftScorer, TokensAt


class CompanionModel(DraftModelProposer):  # type: ignore[misc]
    """A companion, loaded as a draft model, with its keys and values in the same blocks."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str) -> None:
        """Set up without loading the model.

        Args:
            vllm_config: a configuration with a ``draft_model`` speculative config.
            device: the worker's device.
            name: folder or hub id of the companion.

        Raises:
            UnsupportedModelError: vLLM cannot use the model with this target.
        """
        config = copy.copy(vllm_config)
        config.speculative_config = as_draft(vllm_config, name)
        super().__init__(config, device)
        self._scorer: DraftScorer | None = None
        self._metadata: CommonAttentionMetadata | None = None
        self._blocks: Integers = np.zeros((0, 0), dtype=np.int64)

    def _get_model(self) -> nn.Module:
        with set_model_tag("companion_model"):
            model: nn.Module = get_model(
                vllm_config=self._create_draft_vllm_config(), prefix="companion_model"
            )
        return model

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        """See vLLM; then set up scoring, which needs the block size."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        self._scorer = DraftScorer(self._forward_packed, self.block_size, self.max_num_tokens)

    @torch.inference_mode()
    def score(
        self,
        drafted: DraftedRequests,
        tokens_at: TokensAt,
        metadata: CommonAttentionMetadata,
        running: Sequence[str],
    ) -> Tensor:
        """Compute the logits of drafted tokens.

        Args:
            drafted: at least one request.
            tokens_at: token ids of texts and drafts.
            metadata: attention metadata of the target's pass, with the batch's block table.
            running: ids of all requests of the batch.

        Returns:
            Logits ``[drafted tokens, vocab]`` at each drafted token's position, request by request.
        """
        assert self._scorer is not None
        self._metadata = metadata
        self._blocks = metadata.block_table_tensor.cpu().numpy().astype(np.int64)
        return self._scorer.score(drafted, tokens_at, self._blocks, running)

    def _forward_packed(
        self, packed: PackedSpans, tokens: Tensor, logit_indices: Integers
    ) -> Tensor:
        """Run one pass; logits of the tokens with the given indices."""
        assert self._metadata is not None
        num_tokens = len(tokens)

        def to_device(values: Integers, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        positions = to_device(packed.positions, torch.int64)
        slots = to_device(slot_mapping(packed, self._blocks, self.block_size), torch.int64)
        starts_cpu = torch.from_numpy(packed.starts.astype(np.int32))
        lengths = to_device(packed.lengths, torch.int32)
        pass_metadata = self._metadata.replace(
            query_start_loc=starts_cpu.to(self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            num_reqs=len(packed.rows),
            num_actual_tokens=num_tokens,
            max_query_len=int(np.diff(packed.starts).max()),
            max_seq_len=int(packed.lengths.max()),
            block_table_tensor=self._metadata.block_table_tensor[
                to_device(packed.rows, torch.int64)
            ],
            slot_mapping=slots,
            positions=None,
            is_prefilling=None,
            req_idx=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        self.input_ids[:num_tokens] = tokens
        self._set_positions(num_tokens, positions)
        _, layer_metadata = self.build_per_group_and_layer_attn_metadata(pass_metadata)
        mode, num_padded, across = self._determine_batch_execution_and_padding(num_tokens)
        inputs, num_slots = self.build_model_inputs_first_pass(num_tokens, num_padded, None)
        with set_forward_context(
            layer_metadata,
            self.vllm_config,
            num_tokens=num_padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(num_slots, slots),
        ):
            hidden = self.model(**inputs)
        logits: Tensor = self.model.compute_logits(hidden[to_device(logit_indices, torch.int64)])
        return logits
