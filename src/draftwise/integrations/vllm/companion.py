"""A third model inside vLLM, that reads what the draft wrote and says what it thinks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from draftwise.errors import UnsupportedModelError
from draftwise.integrations.vllm.following import Follower, Integers, Packed, Span, in_passes, pack


@dataclass(frozen=True)
class Drafted:
    """A request with a draft.

    Attributes:
        name: by which vLLM knows it.
        row: in the step's batch.
        text: ``[n]`` all its tokens, prompt and output.
        draft: ``[m]`` at least one drafted token.
    """

    name: str
    row: int
    text: Integers
    draft: Integers


class CompanionModel(DraftModelProposer):  # type: ignore[misc]
    """The companion: loaded as a draft model is, with keys and values in the same blocks.

    When it is asked it reads, of each request with a draft, what it has not seen of the text and
    the drafted tokens but the last, in one pass (more where that is longer than vLLM's largest
    batch). In between it does nothing.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str) -> None:
        """Set up; nothing is loaded yet.

        Args:
            vllm_config: with a ``draft_model`` speculative config.
            device: of the worker.
            name: folder or hub id.

        Raises:
            UnsupportedModelError: the model cannot be the companion of these two.
        """
        config = copy.copy(vllm_config)
        config.speculative_config = _as_draft(vllm_config, name)
        super().__init__(config, device)
        self._follower: Follower | None = None

    def _get_model(self) -> nn.Module:
        with set_model_tag("companion_model"):
            model: nn.Module = get_model(
                vllm_config=self._create_draft_vllm_config(), prefix="companion_model"
            )
        return model

    @torch.inference_mode()
    def judge(
        self,
        requests: Sequence[Drafted],
        metadata: CommonAttentionMetadata,
        running: Sequence[str],
    ) -> Tensor:
        """What it thinks of drafts.

        Args:
            requests: at least one.
            metadata: of the target's pass, with the blocks of the whole batch.
            running: names of all requests of the batch.

        Returns:
            ``[drafted tokens, vocab]`` logits at the place of each drafted token, request after
            request.
        """
        if self._follower is None:
            self._follower = Follower(self.block_size)
        self._follower.keep_only(running)
        blocks = metadata.block_table_tensor.cpu().numpy().astype(np.int64)
        spans = []
        for request in requests:
            # The last token of the text is read anew: the first drafted one is judged after it.
            known = self._follower.known(request.name, blocks[request.row])
            start = min(known, len(request.text) - 1)
            tokens = np.concatenate([request.text[start:], request.draft[:-1]])
            spans.append(Span(request.row, start, tokens))
        firsts = {request.row: len(request.text) - 1 for request in requests}
        found = [
            self._read(pack(part, blocks, self.block_size), metadata, firsts)
            for part in in_passes(spans, self.max_num_tokens)
        ]
        for request in requests:
            self._follower.follow(request.name, len(request.text), blocks[request.row])
        return torch.cat(found)

    def _read(
        self, packed: Packed, metadata: CommonAttentionMetadata, firsts: dict[int, int]
    ) -> Tensor:
        """One pass: logits of the tokens from each request's first place on."""
        num_tokens = len(packed.tokens)

        def there(values: Integers, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        positions = there(packed.positions, torch.int64)
        slots = there(packed.slots, torch.int64)
        starts_cpu = torch.from_numpy(packed.starts.astype(np.int32))
        lengths = there(packed.lengths, torch.int32)
        of_pass = metadata.replace(
            query_start_loc=starts_cpu.to(self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            num_reqs=len(packed.rows),
            num_actual_tokens=num_tokens,
            max_query_len=int(np.diff(packed.starts).max()),
            max_seq_len=int(packed.lengths.max()),
            block_table_tensor=metadata.block_table_tensor[there(packed.rows, torch.int64)],
            slot_mapping=slots,
            positions=None,
            is_prefilling=None,
            req_idx=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        self.input_ids[:num_tokens] = there(packed.tokens, self.input_ids.dtype)
        self._set_positions(num_tokens, positions)
        _, of_layers = self.build_per_group_and_layer_attn_metadata(of_pass)
        mode, num_padded, across = self._determine_batch_execution_and_padding(num_tokens)
        inputs, num_slots = self.build_model_inputs_first_pass(num_tokens, num_padded, None)
        with set_forward_context(
            of_layers,
            self.vllm_config,
            num_tokens=num_padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(num_slots, slots),
        ):
            hidden = self.model(**inputs)
        owners = np.repeat(packed.rows, np.diff(packed.starts))
        first = np.array([firsts[int(row)] for row in owners])
        wanted = there(np.flatnonzero(packed.positions >= first), torch.int64)
        logits: Tensor = self.model.compute_logits(hidden[wanted])
        return logits


def _as_draft(vllm_config: VllmConfig, name: str) -> SpeculativeConfig:
    """The settings of a draft model, for the companion.

    Raises:
        UnsupportedModelError: vLLM cannot take it for a draft of this target.
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
        raise UnsupportedModelError("draftwise.companion", f"{name!r}: {error}") from error
