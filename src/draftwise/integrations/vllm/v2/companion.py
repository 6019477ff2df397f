"""A third model inside vLLM, that reads what the draft wrote (V2 model runner)."""

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
from draftwise.integrations.vllm.drafting import DraftReader, TokensAt
from draftwise.integrations.vllm.following import Drafted, Integers, Packed


@dataclass(frozen=True)
class _Memory:
    """Where keys and values are.

    Attributes:
        config: of all models' keys and values.
        tables: blocks of the requests.
        group: of those in ``config`` the one that the companion's layers are in.
        attention: what builds the metadata of its layers, by group.
        slots: ``[groups, tokens]`` int64 to write in.
        reader: says what to read.
    """

    config: KVCacheConfig
    tables: BlockTables
    group: int
    attention: list[list[object]]
    slots: Tensor
    reader: DraftReader


class CompanionModel:
    """The companion: loaded as a draft model is, with keys and values in blocks of its own kind."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str) -> None:
        """Set up; nothing is loaded yet.

        Args:
            vllm_config: with a ``draft_model`` speculative config.
            device: of the worker.
            name: folder or hub id.

        Raises:
            UnsupportedModelError: the model cannot be the companion of these two.
        """
        self._vllm_config = vllm_config
        self._device = device
        self._config = as_draft(vllm_config, name)
        self._most_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._model: nn.Module | None = None
        self._layers: set[str] = set()
        self._memory: _Memory | None = None
        self._requests: Tensor = torch.zeros(0)

    def load_model(self) -> None:
        """Load it; its layers get keys and values as any other's."""
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
        """From now on there are keys and values.

        Args:
            config: of all models' keys and values.
            tables: blocks of the requests.

        Raises:
            UnsupportedModelError: its layers' keys and values are not all of one kind.
        """
        groups = [
            number
            for number, group in enumerate(config.kv_cache_groups)
            if self._layers.intersection(group.layer_names)
        ]
        if len(groups) != 1:
            raise UnsupportedModelError(
                "draftwise.companion", "its layers must all attend in the same way"
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
                self._most_tokens,
                dtype=torch.int64,
                device=self._device,
            ),
            DraftReader(self._read, tables.block_sizes[groups[0]], self._most_tokens),
        )

    @torch.inference_mode()
    def judge(
        self, drafted: Drafted, tokens_at: TokensAt, requests: Tensor, running: list[str]
    ) -> Tensor:
        """What it thinks of drafts.

        Args:
            drafted: at least one request.
            tokens_at: tokens of texts and drafts.
            requests: ``[batch]`` int64 by which vLLM's tables know the requests of the batch.
            running: names of them.

        Returns:
            ``[drafted tokens, vocab]`` logits at the place of each drafted token, request after
            request.
        """
        memory = self._ready()
        self._requests = requests
        blocks = memory.tables.input_block_tables[memory.group][: len(running)]
        of_batch = blocks.cpu().numpy().astype(np.int64)
        return memory.reader.judge(drafted, tokens_at, of_batch, running)

    @torch.inference_mode()
    def pass_without_context(self, num_tokens: int) -> None:
        """One pass over so many tokens that writes nothing, to be timed."""
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        self._forward(zeros.int(), zeros, None, None)

    def _read(self, packed: Packed, tokens: Tensor, wanted: Integers) -> Tensor:
        """One pass: logits of the tokens that are wanted."""
        memory = self._ready()
        num_tokens, num_requests = len(tokens), len(packed.rows)

        def there(values: Integers, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(self._device, dtype)

        rows = there(packed.rows, torch.int64)
        positions = there(packed.positions, torch.int64)
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
        of_layers = build_slot_mappings_by_layer(slots, memory.config)
        hidden = self._forward(tokens, positions, metadata, of_layers)
        logits: Tensor = self._loaded().compute_logits(hidden[there(wanted, torch.int64)])
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
