"""The companion: a third model inside vLLM that scores drafts (V2 model runner)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, get_layers_from_vllm_config, replace
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
)
from vllm.v1.worker.gpu.block_table import BlockTables

from draftwise.errors import UnsupportedModelError
from draftwise.integrations.vllm.companion import as_draft
from draftwise.integrations.vllm.paged_cache import DraftedRequests, Integers, PackedSpans
from draftwise.integrations.vllm.scoring import DraftScorer, TokensAt


@dataclass(frozen=True)
class _Memory:
    """The companion's part of vLLM's KV cache.

    Attributes:
        config: configuration of the KV cache of all models.
        tables: block tables of the requests.
        group: index of the companion's group in ``config``.
        attention: attention groups of the companion's layers.
        slots: ``[groups, tokens]`` int64 buffer for slot mappings.
        scorer: scores drafts with this cache.
    """

    config: KVCacheConfig
    tables: BlockTables
    group: int
    attention: list[list[object]]
    slots: Tensor
    scorer: DraftScorer


class CompanionModel:
    """A companion, loaded as a draft model, with its keys and values in a group of the KV cache."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str) -> None:
        """Set up without loading the model.

        Args:
            vllm_config: a configuration with a ``draft_model`` speculative config.
            device: the worker's device.
            name: folder or hub id of the companion.

        Raises:
            UnsupportedModelError: vLLM cannot use the model with this target.
        """
        self._vllm_config = vllm_config
        self._device = device
        self._config = as_draft(vllm_config, name)
        self._max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._model: nn.Module | None = None
        self._layers: set[str] = set()
        self._memory: _Memory | None = None
        self._requests: Tensor = torch.zeros(0)

    def load_model(self) -> None:
        """Load the model and register its attention layers for vLLM's KV cache."""
        before = self._attention_layers()
        config = replace(
            self._vllm_config,
            model_config=self._config.draft_model_config,
            quant_config=None,
            parallel_config=replace(
                self._config.draft_parallel_config, rank=self._vllm_config.parallel_config.rank
            ),
        )
        with set_model_tag("companion_model"):
            self._model = get_model(vllm_config=config, prefix="companion_model")
        self._layers = self._attention_layers() - before

    def set_attn(self, config: KVCacheConfig, tables: BlockTables) -> None:
        """Set up attention and scoring after vLLM has allocated the KV cache.

        Args:
            config: configuration of the KV cache of all models.
            tables: block tables of the requests.

        Raises:
            UnsupportedModelError: the companion's layers are not all in one group of the cache.
        """
        groups = [
            number
            for number, group in enumerate(config.kv_cache_groups)
            if self._layers.intersection(group.layer_names)
        ]
        if len(groups) != 1:
            raise UnsupportedModelError(
                "draftwise.companion", "its layers must all have the same kind of attention"
            )
        attention, _, _ = init_attn_backend(
            config, self._vllm_config, self._device, active_layer_names=self._layers
        )
        self._memory = _Memory(
            config,
            tables,
            groups[0],
            attention,
            torch.zeros(
                len(config.kv_cache_groups),
                self._max_tokens,
                dtype=torch.int64,
                device=self._device,
            ),
            DraftScorer(self._forward_packed, tables.block_sizes[groups[0]], self._max_tokens),
        )

    @torch.inference_mode()
    def score(
        self, drafted: DraftedRequests, tokens_at: TokensAt, requests: Tensor, running: list[str]
    ) -> Tensor:
        """Compute the logits of drafted tokens.

        Args:
            drafted: at least one request.
            tokens_at: token ids of texts and drafts.
            requests: ``[batch]`` int64 rows of the batch's requests in vLLM's tables.
            running: ids of all requests of the batch.

        Returns:
            Logits ``[drafted tokens, vocab]`` at each drafted token's position, request by request.
        """
        memory = self._ready()
        self._requests = requests
        blocks = memory.tables.input_block_tables[memory.group][: len(running)]
        block_table = blocks.cpu().numpy().astype(np.int64)
        return memory.scorer.score(drafted, tokens_at, block_table, running)

    @torch.inference_mode()
    def pass_without_context(self, num_tokens: int) -> None:
        """Run one pass over ``num_tokens`` tokens that writes nothing, to be timed."""
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        self._forward(zeros.int(), zeros, None, None)

    def _forward_packed(
        self, packed: PackedSpans, tokens: Tensor, logit_indices: Integers
    ) -> Tensor:
        """Run one pass; logits of the tokens with the given indices."""
        memory = self._ready()
        num_tokens, num_requests = len(tokens), len(packed.rows)

        def to_device(values: Integers, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(self._device, dtype)

        rows = to_device(packed.rows, torch.int64)
        positions = to_device(packed.positions, torch.int64)
        starts_cpu = torch.from_numpy(packed.starts.astype(np.int32))
        starts = starts_cpu.to(self._device)
        lengths_cpu = torch.from_numpy(packed.lengths.astype(np.int32))
        slots = memory.tables.compute_slot_mappings(
            self._requests[rows], starts, positions, num_tokens, out=memory.slots
        )
        metadata = build_attn_metadata(
            attn_groups=memory.attention,
            num_reqs=num_requests,
            num_tokens=num_tokens,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts_cpu,
            max_query_len=int(np.diff(packed.starts).max()),
            seq_lens=lengths_cpu.to(self._device),
            max_seq_len=int(packed.lengths.max()),
            block_tables=[table[rows] for table in memory.tables.input_block_tables],
            slot_mappings=slots,
            kv_cache_config=memory.config,
            seq_lens_cpu_upper_bound=lengths_cpu,
            positions=positions,
            is_prefilling=torch.zeros(num_requests, dtype=torch.bool),
        )
        layer_slots = build_slot_mappings_by_layer(slots, memory.config)
        hidden = self._forward(tokens, positions, metadata, layer_slots)
        logits: Tensor = self._loaded().compute_logits(
            hidden[to_device(logit_indices, torch.int64)]
        )
        return logits

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        metadata: dict[str, object] | None,
        slots: dict[str, Tensor] | None,
    ) -> Tensor:
        num_tokens = len(tokens)
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):
            hidden = self._loaded()(input_ids=tokens, positions=positions)
        result: Tensor = hidden[0] if isinstance(hidden, tuple) else hidden
        return result

    def _attention_layers(self) -> set[str]:
        return set(get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase))

    def _loaded(self) -> Any:
        assert self._model is not None
        return self._model

    def _ready(self) -> _Memory:
        assert self._memory is not None
        return self._memory
