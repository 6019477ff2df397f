"""The companion: a third model inside vLLM that scores drafts, for both model runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig, get_layers_from_vllm_config, replace
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, init_attn_backend

from draftwise.core.types import Draft
from draftwise.errors import UnsupportedModelError
from draftwise.integrations.vllm.paged_cache import (
    ComputedTokens,
    DraftedRequests,
    Integers,
    PackedSpans,
    pack,
    slot_mapping,
    split_into_passes,
)

_SETTING = "draftwise.companion"
# How a pass over a number of tokens runs: the kind of CUDA graph, and the tokens with padding.
# vLLM's function also returns the tokens of other ranks, which are not used.
Dispatch = Callable[[int, bool], tuple[CUDAGraphMode, int, Tensor | None]]


class CompanionModel:
    """A companion, loaded as a draft model, whose keys and values are in vLLM's KV cache.

    They are stored in blocks that vLLM allocates to each request. In steps that do not need the
    companion it computes nothing. When it is needed again, it also reads the tokens that it has
    missed.

    Attributes:
        group: index of the companion's group in vLLM's KV cache, once there is a cache.
        dispatch: says how a pass runs; without CUDA graphs by default.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str) -> None:
        """Set up without loading the model.

        Args:
            vllm_config: a configuration with a ``draft_model`` speculative config.
            device: the worker's device.
            name: folder or hub id of the companion.

        Raises:
            UnsupportedModelError: vLLM cannot use the model with this target.
        """
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise UnsupportedModelError(_SETTING, "does not support decode context parallelism")
        self.group = 0
        self.dispatch: Dispatch = lambda num_tokens, _: (CUDAGraphMode.NONE, num_tokens, None)
        self._vllm_config = vllm_config
        self._device = device
        self._config = _as_draft(vllm_config, name)
        self._max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._model: nn.Module | None = None
        self._layers: set[str] = set()
        self._cache: KVCacheConfig | None = None
        self._attention: list[list[Any]] = []
        self._block_size = 0
        self._computed = ComputedTokens(1)
        # The inputs of a pass. CUDA graphs need them in the same place in every pass.
        self._ids = torch.zeros(self._max_tokens, dtype=torch.int32, device=device)
        self._positions, self._slots = (
            torch.zeros(self._max_tokens, dtype=torch.int64, device=device) for _ in range(2)
        )

    def load_model(self) -> None:
        """Load the model and register its attention layers for vLLM's KV cache."""
        before = self._attention_layers()
        config = self._vllm_config
        config = replace(
            config,
            model_config=self._config.draft_model_config,
            quant_config=None,
            parallel_config=replace(
                self._config.draft_parallel_config, rank=config.parallel_config.rank
            ),
            # As for a draft model, the target's backend need not suit this model.
            attention_config=replace(config.attention_config, backend=None),
        )
        with set_model_tag("companion_model"):
            self._model = get_model(vllm_config=config, prefix="companion_model")
        self._layers = self._attention_layers() - before

    def set_attn(self, config: KVCacheConfig) -> None:
        """Set up attention when vLLM has planned the KV cache.

        Args:
            config: configuration of the KV cache of all models.

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
                _SETTING, "its layers must all have the same kind of attention"
            )
        self.group = groups[0]
        self._cache = config
        self._attention, _, _ = init_attn_backend(
            config, self._vllm_config, self._device, active_layer_names=self._layers
        )
        self._block_size = config.kv_cache_groups[self.group].kv_cache_spec.block_size
        self._computed = ComputedTokens(self._block_size)

    @torch.inference_mode()
    def score(
        self,
        draft: Draft,
        names: Sequence[str],
        text_lengths: Integers,
        texts: Tensor,
        rows: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """Compute the logits of drafted tokens.

        This takes one pass, or several if there are more tokens than vLLM allows in a pass.

        Args:
            draft: the draft of the batch, with at least one token.
            names: ids of the requests of the batch.
            text_lengths: ``[batch]`` tokens of each request, prompt and output.
            texts: ``[rows, length]`` int32 token ids of the requests.
            rows: ``[batch]`` int64 row of each request in ``texts``, on the same device.
            block_table: ``[batch, blocks]`` block table of :attr:`group`.

        Returns:
            Logits ``[drafted tokens, vocab]`` at each drafted token's position, request by request.
        """
        blocks = block_table.cpu().numpy().astype(np.int64)
        lengths = np.array(draft.lengths, dtype=np.int64)
        places = np.flatnonzero(lengths)
        drafted = DraftedRequests(
            [names[place] for place in places.tolist()],
            places,
            text_lengths[places],
            lengths[places],
        )
        self._computed.keep_only(names)
        spans = self._computed.missing(drafted, blocks[places])
        drafted_tokens = draft.tokens.to(texts.device)
        logits = []
        for part in split_into_passes(spans, self._max_tokens):
            packed = pack(part)
            after = packed.positions - text_lengths[packed.owners]
            owners, positions, index = (
                torch.from_numpy(values).to(texts.device)
                for values in (packed.owners, packed.positions, after)
            )
            tokens = torch.where(
                index < 0,
                texts[rows[owners], positions.clamp(max=texts.shape[1] - 1)],
                drafted_tokens[owners, index.clamp(0, drafted_tokens.shape[1] - 1)],
            )
            logits.append(
                self._logits(packed, tokens, np.flatnonzero(after >= -1), blocks, block_table)
            )
        self._computed.record(drafted.names, drafted.text_lengths, blocks[places])
        return torch.cat(logits)

    @torch.inference_mode()
    def pass_without_context(self, num_tokens: int, use_cudagraphs: bool = True) -> None:
        """Run one pass over ``num_tokens`` tokens that writes nothing: to warm up, or to be timed.

        Args:
            num_tokens: number of tokens.
            use_cudagraphs: whether the pass may capture or use CUDA graphs.
        """
        self._forward(num_tokens, None, use_cudagraphs)

    def _logits(
        self,
        packed: PackedSpans,
        tokens: Tensor,
        logit_indices: Integers,
        blocks: Integers,
        block_table: Tensor,
    ) -> Tensor:
        """Run one pass; logits of the tokens with the given indices."""
        assert self._cache is not None
        num_tokens, num_requests = len(tokens), len(packed.rows)

        def to_device(values: Integers) -> Tensor:
            return torch.from_numpy(values).to(self._device)

        self._ids[:num_tokens] = tokens
        self._positions[:num_tokens] = to_device(packed.positions)
        self._slots[:num_tokens] = to_device(slot_mapping(packed, blocks, self._block_size))
        starts = torch.from_numpy(packed.starts.astype(np.int32))
        lengths = torch.from_numpy(packed.lengths.astype(np.int32))
        # Only the companion's group has layers here. The others' tables are not read.
        num_groups = len(self._cache.kv_cache_groups)
        metadata = build_attn_metadata(
            attn_groups=self._attention,
            num_reqs=num_requests,
            num_tokens=num_tokens,
            query_start_loc_gpu=starts.to(self._device),
            query_start_loc_cpu=starts,
            max_query_len=int(np.diff(packed.starts).max()),
            seq_lens=lengths.to(self._device),
            max_seq_len=int(packed.lengths.max()),
            block_tables=[block_table[to_device(packed.rows)]] * num_groups,
            slot_mappings=self._slots[:num_tokens].expand(num_groups, -1),
            kv_cache_config=self._cache,
            seq_lens_cpu_upper_bound=lengths,
            positions=self._positions[:num_tokens],
            is_prefilling=torch.zeros(num_requests, dtype=torch.bool),
        )
        hidden = self._forward(num_tokens, metadata, True)
        logits: Tensor = self._loaded().compute_logits(hidden[to_device(logit_indices)])
        return logits

    def _forward(
        self, num_tokens: int, metadata: dict[str, Any] | None, use_cudagraphs: bool
    ) -> Tensor:
        """Run the model over the first tokens of its inputs. Without metadata it stores nothing."""
        mode, num_padded, _ = self.dispatch(num_tokens, use_cudagraphs)
        self._slots[num_tokens:num_padded] = PAD_SLOT_ID
        slots = None if metadata is None else dict.fromkeys(self._layers, self._slots[:num_padded])
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=num_padded,
            cudagraph_runtime_mode=mode,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=num_padded),
        ):
            hidden = self._loaded()(
                input_ids=self._ids[:num_padded], positions=self._positions[:num_padded]
            )
        result: Tensor = hidden[0] if isinstance(hidden, tuple) else hidden
        return result

    def _attention_layers(self) -> set[str]:
        return set(get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase))

    def _loaded(self) -> Any:
        assert self._model is not None
        return self._model


def _as_draft(vllm_config: VllmConfig, name: str) -> SpeculativeConfig:
    """A speculative config with the companion as the draft model.

    Raises:
        UnsupportedModelError: vLLM cannot use the companion as a draft of this target.
    """
    draft = vllm_config.speculative_config
    try:
        return SpeculativeConfig(
            method="draft_model",
            model=name,
            num_speculative_tokens=draft.num_speculative_tokens,
            target_model_config=draft.target_model_config,
            target_parallel_config=draft.target_parallel_config,
            draft_tensor_parallel_size=draft.draft_parallel_config.tensor_parallel_size,
        )
    except (ValueError, OSError) as error:
        raise UnsupportedModelError(_SETTING, f"{name!r}: {error}") from error
