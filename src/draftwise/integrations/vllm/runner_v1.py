"""Drafters for vLLM's V1 model runner: its draft model, or the texts, controlled by a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft
from draftwise.integrations.vllm.companion import CompanionModel
from draftwise.integrations.vllm.hooks import DraftHooks, StopDrafting
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, verified_by_request
from draftwise.integrations.vllm.text_drafts import Texts

# Temperatures below this are greedy, as in vLLM's sampler.
_GREEDY = 1e-5


class SteeredProposer(DraftModelProposer):  # type: ignore[misc]
    """vLLM's proposer, whose drafting loop ends early and whose drafts are selected by a policy.

    vLLM's loop samples each token in :meth:`_sample_draft_tokens`. The override calls the policy,
    and raises an exception to leave the loop when no request continues. Tokens that a request
    drafted after its end are dropped.

    Attributes:
        has_draft_model: always true.
        hooks: calls the policy.
        companion: scores drafts; ``None`` without a companion.
        skips_dummy_runs: whether :meth:`dummy_run` does nothing, so that the target is timed alone.
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
            runner: the V1 model runner.
            steering: drives the policy.
            companion: scores drafts; ``None`` without a companion.
        """
        super().__init__(vllm_config, device, runner)
        self.hooks = DraftHooks(steering)
        self.companion = companion
        self.skips_dummy_runs = False
        self._runner = runner
        self._max_draft_length: int = vllm_config.speculative_config.num_speculative_tokens
        self._num_gained: list[int] = []
        self._num_verified: list[int] | None = None
        self._drawn: list[Tensor] = []
        self._probs: list[Tensor] = []
        if companion is not None:
            companion.dispatch = self._determine_batch_execution_and_padding

    def install(self) -> None:
        """Replace the model runner's drafter."""
        self._runner.drafter = self

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then the companion."""
        super().load_model(target_model)
        if self.companion is not None:
            self.companion.load_model()

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        """Initialise the attention of the draft and the companion."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if self.companion is not None:
            self.companion.set_attn(kv_cache_config)

    def dummy_run(self, num_tokens: int, use_cudagraphs: bool = True, **options: Any) -> None:
        """Run the draft and the companion on dummy inputs."""
        if self.skips_dummy_runs:
            return
        super().dummy_run(num_tokens, use_cudagraphs, **options)
        if self.companion is not None:
            self.companion.pass_without_context(num_tokens, use_cudagraphs)

    def draft_pass(self, num_tokens: int) -> None:
        """Run one pass of the draft over ``num_tokens`` requests, to be timed."""
        super().dummy_run(num_tokens, is_graph_capturing=True)  # a single pass when capturing

    def prepare_next_token_ids_padded(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See vLLM; also stores the tokens that each request gained.

        vLLM writes the same tokens to the same places when this step has drafted.
        """
        next_tokens, num_valid = super().prepare_next_token_ids_padded(*args, **kwargs)
        sampled = args[0] if args else kwargs["sampled_token_ids"]
        self._num_gained = num_valid.tolist()
        batch = self._runner.input_batch
        for row, (tokens, count) in enumerate(zip(sampled.tolist(), self._num_gained, strict=True)):
            start = batch.num_tokens_no_spec[row]
            batch.token_ids_cpu[row, start : start + count] = tokens[:count]
        return next_tokens, num_valid

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: Tensor,
    ) -> tuple[CommonAttentionMetadata, Tensor, Tensor]:
        """See vLLM; also records the number of verified drafted tokens of each request."""
        self._num_verified = list(spec_decode_metadata.num_draft_tokens)
        return super().prepare_inputs_padded(  # type: ignore[no-any-return]
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )

    def propose(
        self,
        num_speculative_tokens: int,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        **inputs: Any,
    ) -> list[list[int]]:
        """Draft; the tokens of each request to verify in the next step, of different lengths.

        Args:
            num_speculative_tokens: maximum number of tokens to draft for a request.
            common_attn_metadata, sampling_metadata: of the target's pass.
            **inputs: vLLM's other arguments.
        """
        batch, count = self._runner.input_batch, len(self._num_gained)
        text_lengths = np.asarray(batch.num_tokens_no_spec[:count], dtype=np.int64)
        text_lengths = text_lengths + self._num_gained
        views = _request_views(
            self._runner,
            text_lengths.tolist(),
            self._num_gained,
            num_speculative_tokens,
            self.max_model_len,
        )
        num_verified, self._num_verified = self._num_verified or [0] * count, None
        names = [view.name for view in views]
        limit = self.hooks.begin(
            views,
            verified_by_request(names, num_verified, self._num_gained),
            int(common_attn_metadata.query_start_loc_cpu[-1]),
            lambda: Texts(batch.token_ids_cpu, np.arange(count)),
            _controls(sampling_metadata, count, self.device),
        )
        self._drawn, self._probs = [], []
        try:
            super().propose(
                num_speculative_tokens=limit,
                common_attn_metadata=common_attn_metadata,
                sampling_metadata=sampling_metadata,
                **inputs,
            )
        except StopDrafting:
            pass
        finally:
            self.num_speculative_tokens = self._max_draft_length

        def score(draft: Draft) -> Tensor:
            assert self.companion is not None
            texts, rows = batch.token_ids_cpu_tensor, torch.arange(count)
            blocks = batch.block_table[self.companion.group].get_device_tensor(count)
            return self.companion.score(draft, names, text_lengths, texts, rows, blocks)

        drafts = torch.stack(self._drawn, dim=1) if self._drawn else None
        lengths = self.hooks.finish(None if self.companion is None else score)
        self._last_draft_probs = (
            torch.stack(self._probs, dim=1).contiguous() if self._probs else None
        )
        tokens = [[] for _ in views] if drafts is None else drafts.tolist()
        for index, own in self.hooks.steering.copies.items():
            tokens[index] = own
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)]

    def _sample_draft_tokens(
        self, hidden_states: Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """See vLLM; also gets the policy's decision which requests continue."""
        logits = self.model.compute_logits(hidden_states)
        soft_probs = self.hooks.soft_probabilities(logits)
        tokens, probs = self._sample_from_logits(logits, sampling_metadata)
        self._drawn.append(tokens)
        if probs is not None:
            self._probs.append(probs)
        self.hooks.drawn(tokens, soft_probs)
        return tokens, probs


class TextDrafter(NgramProposer):  # type: ignore[misc]
    """Replaces vLLM's proposer of the method ``ngram``, whose class the runner checks.

    vLLM calls :meth:`propose` after it has stored the sampled tokens, so its memory has the whole
    texts. It verifies drafts without probabilities as one-hot proposals.

    Attributes:
        has_draft_model: always false.
        hooks: calls the policy.
        companion: always ``None``.
        skips_dummy_runs: has no effect, as there is nothing to run.
        num_speculative_tokens: maximum number of tokens drafted per step.
    """

    has_draft_model = False
    companion = None
    skips_dummy_runs = False

    def __init__(self, vllm_config: VllmConfig, runner: Any, steering: Steering) -> None:
        """Set up. The compiled search of the base class is not used.

        Args:
            vllm_config: a configuration with an ``ngram`` speculative config.
            runner: the V1 model runner.
            steering: drives the policy.
        """
        self.hooks = DraftHooks(steering)
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._runner = runner

    def install(self) -> None:
        """Replace the model runner's drafter."""
        self._runner.drafter = self
        # vLLM drafts for no request while one of them is too long for a whole draft. Here each
        # request has its own limit.
        self._runner.effective_drafter_max_model_len += self.num_speculative_tokens + 1

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft; the tokens of each request to verify in the next step, of different lengths."""
        runner, count = self._runner, len(sampled_token_ids)
        num_gained = [len(tokens) for tokens in sampled_token_ids]
        views = _request_views(
            runner,
            num_tokens_no_spec[:count].tolist(),
            num_gained,
            num_speculative_tokens,
            runner.max_model_len,
        )
        num_verified = [len(tokens) for tokens in runner.input_batch.spec_token_ids[:count]]
        self.hooks.begin(
            views,
            verified_by_request([view.name for view in views], num_verified, num_gained),
            int(runner.query_start_loc.np[count]),
            lambda: Texts(token_ids_cpu, np.arange(count)),
        )
        lengths, copies = self.hooks.finish(), self.hooks.steering.copies
        return [copies.get(row, [])[:length] for row, length in enumerate(lengths)]


def _request_views(
    runner: Any,
    text_lengths: Sequence[int],
    num_gained: Sequence[int],
    max_draft_length: int,
    max_model_len: int,
) -> list[RequestView]:
    """The requests of the step, including the tokens that they just gained.

    Args:
        runner: the V1 model runner.
        text_lengths: ``[batch]`` tokens of each request, with those that it just gained.
        num_gained: ``[batch]`` tokens that each request just gained; 0 while its prompt is
            processed.
        max_draft_length: maximum number of tokens to draft.
        max_model_len: maximum length of a text.
    """
    views = []
    for name, num_tokens, gained in zip(
        runner.input_batch.req_ids, text_lengths, num_gained, strict=True
    ):
        request = runner.requests[name]
        params = request.sampling_params
        num_output = num_tokens - request.num_prompt_tokens
        left = max_model_len - num_tokens - 1
        if params is not None and params.max_tokens is not None:
            left = min(left, params.max_tokens - num_output - 1)
        room = max(0, min(left, max_draft_length)) if gained else 0
        greedy = params is None or params.temperature < _GREEDY
        views.append(RequestView(name, num_tokens, max(num_output, 0), room, greedy))
    return views


def _controls(
    sampling_metadata: SamplingMetadata, batch_size: int, device: torch.device
) -> LogitControls:
    """The batch's temperatures, 0 for greedy requests. vLLM's draft ignores all other controls."""
    temperature = sampling_metadata.temperature
    if sampling_metadata.all_greedy or temperature is None:
        return LogitControls(torch.zeros(batch_size, device=device), all_greedy=True)
    temperature = temperature[:batch_size].float()
    zeroed = torch.where(temperature < _GREEDY, 0.0, temperature)
    return LogitControls(zeroed, False, not sampling_metadata.all_random)
