"""vLLM's draft model, steered by a policy of ours (V1 model runner)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft
from draftwise.errors import UnsupportedModelError
from draftwise.integrations.vllm.drafting import Drafting, Enough, drafted_requests
from draftwise.integrations.vllm.following import Integers
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import Member, verified_of
from draftwise.integrations.vllm.v1.companion import CompanionModel

# Temperatures below are greedy, as in vLLM's sampler.
_GREEDY = 1e-5


class SteeredProposer(DraftModelProposer):  # type: ignore[misc]
    """Drafts with vLLM's own loop, ends it where the policy says so, and sends what it selects.

    The loop asks for a token in :meth:`_sample_draft_tokens`; there the policy is asked, and an
    exception leaves the loop when nobody goes on. What a request has drafted beyond its end is cut.

    Attributes:
        drafting: asks the policy.
        companion: judges drafts; ``None`` for nobody.
        rests: whether :meth:`dummy_run` does nothing, so that the target can be timed alone.
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
            runner: the V1 model runner.
            steering: with the policy.
            companion: judges drafts; ``None`` for nobody.
        """
        super().__init__(vllm_config, device, runner)
        self.drafting = Drafting(steering)
        self.companion = companion
        self.rests = False
        self._runner = runner
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._gained: list[list[int]] = []
        self._num_sent: list[int] | None = None
        self._drawn: list[Tensor] = []
        self._probs: list[Tensor] = []

    def take_place(self) -> None:
        """Draft for the model runner from now on."""
        self._runner.drafter = self

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then the companion."""
        super().load_model(target_model)
        if self.companion is not None:
            self.companion.load_model(target_model)

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        """Of both small models."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if self.companion is None:
            return
        self.companion.initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if self.companion.kv_cache_gid != self.kv_cache_gid:
            raise UnsupportedModelError(
                "draftwise.companion",
                "vLLM keeps its keys and values apart from the draft's; its attention must be of "
                "the same kind",
            )

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """Of both small models."""
        super().initialize_cudagraph_keys(cudagraph_mode)
        if self.companion is not None:
            self.companion.initialize_cudagraph_keys(cudagraph_mode)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Of both small models."""
        if self.rests:
            return
        super().dummy_run(*args, **kwargs)
        if self.companion is not None:
            self.companion.dummy_run(*args, **kwargs)

    def draft_pass(self, num_tokens: int) -> None:
        """One pass of the draft over so many requests, to be timed."""
        super().dummy_run(num_tokens, is_graph_capturing=True)  # which makes it one only

    def companion_pass(self, num_tokens: int) -> None:
        """One pass of the companion over so many tokens, to be timed."""
        assert self.companion is not None
        self.companion.dummy_run(num_tokens, is_graph_capturing=True)

    def prepare_next_token_ids_padded(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As vLLM does; remembers which tokens each request gained."""
        next_tokens, num_valid = super().prepare_next_token_ids_padded(*args, **kwargs)
        sampled = args[0] if args else kwargs["sampled_token_ids"]
        self._gained = [
            row[:count] for row, count in zip(sampled.tolist(), num_valid.tolist(), strict=True)
        ]
        return next_tokens, num_valid

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: Tensor,
    ) -> tuple[CommonAttentionMetadata, Tensor, Tensor]:
        """As vLLM does; remembers how many drafted tokens each request had verified."""
        self._num_sent = list(spec_decode_metadata.num_draft_tokens)
        return super().prepare_inputs_padded(  # type: ignore[no-any-return]
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """What to verify of each request in the next step; of different lengths."""
        members = self._members(num_speculative_tokens)
        sent, self._num_sent = self._num_sent or [0] * len(members), None
        names = [member.name for member in members]
        limit = self.drafting.begin(
            members,
            verified_of(names, sent, [len(gained) for gained in self._gained]),
            int(common_attn_metadata.query_start_loc_cpu[-1]),
            _controls(sampling_metadata, len(members), self.device),
        )
        self._drawn, self._probs = [], []
        try:
            super().propose(
                num_speculative_tokens=limit,
                target_token_ids=target_token_ids,
                target_positions=target_positions,
                target_hidden_states=target_hidden_states,
                next_token_ids=next_token_ids,
                token_indices_to_sample=token_indices_to_sample,
                common_attn_metadata=common_attn_metadata,
                sampling_metadata=sampling_metadata,
                mm_embed_inputs=mm_embed_inputs,
                num_rejected_tokens_gpu=num_rejected_tokens_gpu,
                slot_mappings=slot_mappings,
            )
        except Enough:
            pass
        finally:
            self.num_speculative_tokens = self._most

        def judge(draft: Draft) -> Tensor:
            return self._judge(draft, members, common_attn_metadata)

        drafts = torch.stack(self._drawn, dim=1) if self._drawn else None
        lengths = self.drafting.finish(None if self.companion is None else judge)
        self._last_draft_probs = (
            torch.stack(self._probs, dim=1).contiguous() if self._probs else None
        )
        if drafts is None:
            return [[] for _ in members]
        tokens = drafts.tolist()
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)]

    def _sample_draft_tokens(
        self, hidden_states: Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """Draw as vLLM does, and ask the policy."""
        logits = self.model.compute_logits(hidden_states)
        believed = self.drafting.beliefs(logits)
        tokens, probs = self._sample_from_logits(logits, sampling_metadata)
        self._drawn.append(tokens)
        if probs is not None:
            self._probs.append(probs)
        self.drafting.drawn(tokens, believed)
        return tokens, probs

    def _members(self, most: int) -> list[Member]:
        """The requests of the step, with what they just gained."""
        batch, requests = self._runner.input_batch, self._runner.requests
        members = []
        for row, name in enumerate(batch.req_ids):
            request = requests[name]
            params = request.sampling_params
            num_gained = len(self._gained[row])
            num_tokens = int(batch.num_tokens_no_spec[row]) + num_gained
            num_output = num_tokens - request.num_prompt_tokens
            left = self.max_model_len - num_tokens - 1
            if params is not None and params.max_tokens is not None:
                left = min(left, params.max_tokens - num_output - 1)
            room = max(0, min(left, most)) if num_gained else 0
            greedy = params is None or params.temperature < _GREEDY
            members.append(Member(name, num_tokens, max(num_output, 0), room, greedy))
        return members

    def _judge(
        self, draft: Draft, members: list[Member], metadata: CommonAttentionMetadata
    ) -> Tensor:
        """What the companion thinks of a draft."""
        assert self.companion is not None
        names = [member.name for member in members]
        texts = np.array([member.num_tokens for member in members], dtype=np.int64)
        drafted = drafted_requests(draft, names, texts)
        before = self._runner.input_batch.num_tokens_no_spec[: len(members)]
        read = self._runner.input_batch.token_ids_cpu
        # Behind what vLLM has written down of each text: what it just gained, and its draft.
        behind = np.zeros((len(members), self._most + 1 + draft.tokens.shape[1]), dtype=np.int64)
        for row, gained in enumerate(self._gained):
            behind[row, : len(gained)] = gained
        places = (texts - before)[:, None] + np.arange(draft.tokens.shape[1])
        np.put_along_axis(behind, places, draft.tokens.cpu().numpy(), axis=1)

        def tokens_at(owners: Integers, positions: Integers) -> Tensor:
            late = positions - before[owners]
            tokens = np.where(
                late < 0,
                read[owners, np.minimum(positions, read.shape[1] - 1)],
                behind[owners, np.maximum(late, 0)],
            )
            return torch.from_numpy(tokens).to(self.device, self.input_ids.dtype)

        return self.companion.judge(drafted, tokens_at, metadata, names)


def _controls(
    sampling_metadata: SamplingMetadata, batch_size: int, device: torch.device
) -> LogitControls:
    """Temperatures of a batch, 0 where a request is greedy; vLLM's draft knows no other setting."""
    temperature = sampling_metadata.temperature
    if sampling_metadata.all_greedy or temperature is None:
        return LogitControls(torch.zeros(batch_size, device=device), all_greedy=True)
    temperature = temperature[:batch_size].float()
    zeroed = torch.where(temperature < _GREEDY, 0.0, temperature)
    return LogitControls(zeroed, False, not sampling_metadata.all_random)
