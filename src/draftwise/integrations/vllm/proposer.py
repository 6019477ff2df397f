"""vLLM's draft model, steered by a policy of ours (V1 model runner)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from draftwise.core.signals import agreement, overlap
from draftwise.core.types import Draft, Judgement
from draftwise.errors import UnsupportedModelError
from draftwise.integrations.vllm.companion import CompanionModel
from draftwise.integrations.vllm.metrics import Metrics
from draftwise.integrations.vllm.steering import Member, Steering, Verified

# Temperatures below are greedy, as in vLLM's sampler.
_GREEDY = 1e-5


# What the target read and added: tokens, positions, next tokens, metadata, number rejected.
Step = tuple[Tensor, Tensor, Tensor, CommonAttentionMetadata, Tensor | None]


class _Enough(Exception):  # noqa: N818
    """Nobody goes on drafting."""


class SteeredProposer(DraftModelProposer):  # type: ignore[misc]
    """Drafts with vLLM's own loop, ends it where the policy says so, and sends what it selects.

    The loop asks for a token in :meth:`_sample_draft_tokens`; there the policy is asked, and an
    exception leaves the loop when nobody goes on. What a request has drafted beyond its end is cut.
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
        self.steering = steering
        self.companion = companion
        self._metrics = Metrics() if get_tp_group().is_first_rank else None
        self._runner = runner
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._num_valid: Tensor | None = None
        self._num_sent: list[int] | None = None
        self._began = 0.0
        self._temperature: Tensor | None = None
        self._drawn: list[Tensor] = []
        self._probs: list[Tensor] = []

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
        super().dummy_run(*args, **kwargs)
        if self.companion is not None:
            self.companion.dummy_run(*args, **kwargs)

    def prepare_next_token_ids_padded(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As vLLM does; remembers how many tokens each request gained."""
        next_tokens, num_valid = super().prepare_next_token_ids_padded(*args, **kwargs)
        self._num_valid = num_valid
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
        began = time.perf_counter()
        members = self._members(num_speculative_tokens)
        limit = self._agree(self._begin(members, common_attn_metadata, began))
        self._began, self._drawn, self._probs = began, [], []
        self._temperature = _temperatures(sampling_metadata, len(members))
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
        except _Enough:
            pass
        finally:
            self.num_speculative_tokens = self._most
        draft_seconds = time.perf_counter() - began
        step: Step = (
            target_token_ids,
            target_positions,
            next_token_ids,
            common_attn_metadata,
            num_rejected_tokens_gpu,
        )
        was_asked = False

        def ask(draft: Draft) -> tuple[Judgement, float]:
            nonlocal was_asked
            was_asked = True
            asked = time.perf_counter()
            judgement = self._judged(draft, step)
            return judgement, time.perf_counter() - asked

        companion = self.companion
        drafts = torch.stack(self._drawn, dim=1) if self._drawn else None
        can_ask = (
            companion is not None
            and drafts is not None
            and companion.fits(len(target_token_ids), *drafts.shape)
        )
        lengths = self.steering.finish(ask if can_ask else None, time.perf_counter, draft_seconds)
        if companion is not None and not was_asked:
            companion.read(*step, None)
        lengths = self._agree(lengths)
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
        wants = self.steering.wants_beliefs
        beliefs = None
        if wants:
            scaled = logits.float()
            if self._temperature is not None:
                scaled = scaled / self._temperature.unsqueeze(1)
            beliefs = scaled.softmax(dim=-1)
        tokens, probs = self._sample_from_logits(logits, sampling_metadata)
        self._drawn.append(tokens)
        if probs is not None:
            self._probs.append(probs)
        if not self._agree(self.steering.drawn(tokens, beliefs)):
            raise _Enough
        return tokens, probs

    def _begin(self, members: list[Member], metadata: CommonAttentionMetadata, now: float) -> int:
        """Tell what became of the last step and ask for the next; the longest draft."""
        gained = [] if self._num_valid is None else self._num_valid.tolist()
        sent = self._num_sent or [0] * len(members)
        self._num_sent = None
        verified = {
            member.name: Verified(length, min(length, max(count - 1, 0)))
            for member, length, count in zip(members, sent, gained, strict=True)
            if count > 0
        }
        num_read = int(metadata.query_start_loc_cpu[-1])
        of_prompts = num_read - sum(v.num_sent + 1 for v in verified.values())
        settled = self.steering.settle(verified, now - self._began, max(of_prompts, 0))
        if settled is not None and self._metrics is not None:
            self._metrics.observe(settled)
        return self.steering.begin(members)

    def _members(self, most: int) -> list[Member]:
        """The requests of the step, with what they just gained."""
        batch, requests = self._runner.input_batch, self._runner.requests
        gained = [] if self._num_valid is None else self._num_valid.tolist()
        members = []
        for row, name in enumerate(batch.req_ids):
            request = requests[name]
            params = request.sampling_params
            num_tokens = int(batch.num_tokens_no_spec[row]) + gained[row]
            num_output = num_tokens - request.num_prompt_tokens
            left = self.max_model_len - num_tokens - 1
            if params is not None and params.max_tokens is not None:
                left = min(left, params.max_tokens - num_output - 1)
            room = max(0, min(left, most)) if gained[row] > 0 else 0
            greedy = params is None or params.temperature < _GREEDY
            members.append(Member(name, num_tokens, max(num_output, 0), room, greedy))
        return members

    def _judged(self, draft: Draft, step: Step) -> Judgement:
        """S and A of a whole draft, in one pass of the companion."""
        assert self.companion is not None
        assert draft.signals is not None
        logits = self.companion.read(*step, torch.stack(self._drawn, dim=1))
        assert logits is not None
        scaled = logits.float()
        if self._temperature is not None:
            scaled = scaled / self._temperature.view(-1, 1, 1)
        beliefs = scaled.softmax(dim=-1)
        q, q_drawn = draft.signals.beliefs, draft.signals.token_probs
        c_drawn = beliefs.gather(2, draft.tokens.unsqueeze(2)).squeeze(2)
        return Judgement(beliefs, overlap(q, beliefs), agreement(q_drawn, c_drawn))

    def _agree(self, value: Any) -> Any:
        """What the first of the ranks says: each measures times of its own."""
        group = get_tp_group()
        return value if group.world_size == 1 else group.broadcast_object(value, src=0)


def _temperatures(sampling_metadata: SamplingMetadata, batch_size: int) -> Tensor | None:
    """``[batch]``, 1 where a request is greedy; ``None`` if all are."""
    temperature = sampling_metadata.temperature
    if sampling_metadata.all_greedy or temperature is None:
        return None
    temperature = temperature[:batch_size]
    scaled: Tensor = torch.where(temperature < _GREEDY, 1.0, temperature)
    return scaled
