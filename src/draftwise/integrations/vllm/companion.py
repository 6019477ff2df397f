"""A third model inside vLLM, that reads what the draft wrote and says what it thinks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from draftwise.errors import UnsupportedModelError


class CompanionModel(DraftModelProposer):  # type: ignore[misc]
    """The companion: loaded as a draft model is, with keys and values in the same blocks.

    In one pass per step it reads what the target read, the token that the target added and, if it
    is asked, the drafted tokens but the last: what vLLM does for drafts that are written in
    parallel, with drafted tokens in the place of masks.
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

    def _get_model(self) -> nn.Module:
        with set_model_tag("companion_model"):
            model: nn.Module = get_model(
                vllm_config=self._create_draft_vllm_config(), prefix="companion_model"
            )
        return model

    @torch.inference_mode()
    def read(
        self,
        target_tokens: Tensor,
        target_positions: Tensor,
        next_tokens: Tensor,
        metadata: CommonAttentionMetadata,
        num_rejected: Tensor | None,
        drafted: Tensor | None,
    ) -> Tensor | None:
        """Follow a step, and judge its draft.

        Args:
            target_tokens: ``[tokens]`` that the target read, rejected ones included.
            target_positions: ``[tokens]`` theirs.
            next_tokens: ``[batch]`` that the target added.
            metadata: of the target's pass.
            num_rejected: ``[batch]`` rejected tokens; ``None`` if nothing was drafted.
            drafted: ``[batch, width]``; ``None`` if it is not asked.

        Returns:
            ``[batch, width, vocab]`` logits at the place of each drafted token.
        """
        batch_size = metadata.batch_size()
        slots = 1 if drafted is None else drafted.shape[1]
        self.extra_slots_per_request = self.net_num_new_slots_per_request = slots
        num_tokens, places, metadata = self.set_inputs_first_pass(
            target_token_ids=target_tokens,
            next_token_ids=next_tokens,
            target_positions=target_positions,
            target_hidden_states=self.hidden_states,
            token_indices_to_sample=None,
            cad=metadata,
            num_rejected_tokens_gpu=num_rejected,
        )
        if drafted is not None and slots > 1:
            behind = places.view(batch_size, slots)[:, 1:].long()
            self.input_ids[behind] = drafted[:, :-1].to(self.input_ids.dtype)
        _, of_layers = self.build_per_group_and_layer_attn_metadata(metadata)
        mode, num_padded, across = self._determine_batch_execution_and_padding(num_tokens)
        inputs, num_slots = self.build_model_inputs_first_pass(num_tokens, num_padded, None)
        with set_forward_context(
            of_layers,
            self.vllm_config,
            num_tokens=num_padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(num_slots, metadata.slot_mapping),
        ):
            hidden = self.model(**inputs)
        if drafted is None:
            return None
        logits: Tensor = self.model.compute_logits(hidden[places])
        return logits.view(batch_size, slots, -1)

    def fits(self, num_tokens: int, batch_size: int, width: int) -> bool:
        """Whether a step of so many tokens of the target leaves room to judge such drafts."""
        return bool(num_tokens + batch_size * width <= self.max_num_tokens)


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
