"""vLLM's draft model, controlled by a policy (V1 model runner)."""

from __future__ import annotations

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

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Draft
from draftwise.errors import UnsupportedModelError
from draftwise.integrations.vllm.hooks import DraftHooks, StopDrafting
from draftwise.integrations.vllm.paged_cache import Integers
from draftwise.integrations.vllm.scoring import drafted_requests
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, verified_by_request
from draftwise.integrations.vllm.text_copies import TextCopies
from draftwise.integrations.vllm.text_drafts import Texts
from draftwise.integrations.vllm.v1.companion import CompanionModel
from draftwise.integrations.vllm.v1.views import GREEDY, request_views


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
        self._gained: list[list[int]] = []
        self._num_verified: list[int] | None = None
        self._drawn: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._copies: TextCopies | None = None

    def install(self) -> None:
        """Replace the model runner's drafter."""
        self._runner.drafter = self

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then the companion."""
        super().load_model(target_model)
        if self.companion is not None:
            self.companion.load_model(target_model)

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        """Initialise the attention of the draft and the companion."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if self.companion is None:
            return
        self.companion.initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if self.companion.kv_cache_gid != self.kv_cache_gid:
            raise UnsupportedModelError(
                "draftwise.companion",
                "its attention must be of the same kind as the draft's, so that vLLM stores their "
                "keys and values in the same blocks",
            )

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """Initialise the CUDA graphs of the draft and the companion."""
        super().initialize_cudagraph_keys(cudagraph_mode)
        if self.companion is not None:
            self.companion.initialize_cudagraph_keys(cudagraph_mode)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Run the draft and the companion on dummy inputs."""
        if self.skips_dummy_runs:
            return
        super().dummy_run(*args, **kwargs)
        if self.companion is not None:
            self.companion.dummy_run(*args, **kwargs)

    def draft_pass(self, num_tokens: int) -> None:
        """Run one pass of the draft over ``num_tokens`` requests, to be timed."""
        super().dummy_run(num_tokens, is_graph_capturing=True)  # a single pass when capturing

    def companion_pass(self, num_tokens: int) -> None:
        """Run one pass of the companion over ``num_tokens`` tokens, to be timed."""
        assert self.companion is not None
        self.companion.dummy_run(num_tokens, is_graph_capturing=True)

    def prepare_next_token_ids_padded(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See vLLM; also records the tokens that each request gained."""
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
        """See vLLM; also records the number of verified drafted tokens of each request."""
        self._num_verified = list(spec_decode_metadata.num_draft_tokens)
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
        """Draft; the tokens of each request to verify in the next step, of different lengths."""
        views = self._views(num_speculative_tokens)
        num_verified, self._num_verified = self._num_verified or [0] * len(views), None
        names = [view.name for view in views]
        limit = self.hooks.begin(
            views,
            verified_by_request(names, num_verified, [len(gained) for gained in self._gained]),
            int(common_attn_metadata.query_start_loc_cpu[-1]),
            _controls(sampling_metadata, len(views), self.device),
            lambda: self._texts(views),
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
        except StopDrafting:
            pass
        finally:
            self.num_speculative_tokens = self._max_draft_length

        def score(draft: Draft) -> Tensor:
            return self._score(draft, views, common_attn_metadata)

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

    def _views(self, max_draft_length: int) -> list[RequestView]:
        """The requests of the step, including the tokens that they just gained."""
        num_gained = [len(gained) for gained in self._gained]
        stored = self._runner.input_batch.num_tokens_no_spec[: len(num_gained)].tolist()
        text_lengths = [n + gained for n, gained in zip(stored, num_gained, strict=True)]
        return request_views(
            self._runner, text_lengths, num_gained, max_draft_length, self.max_model_len
        )

    def _texts(self, views: list[RequestView]) -> Texts:
        """The texts of the requests, with the tokens that vLLM has not stored yet."""
        if self._copies is None:
            num_rows = self._runner.vllm_config.scheduler_config.max_num_seqs
            self._copies = TextCopies(num_rows, self.max_model_len)
        batch, count = self._runner.input_batch, len(views)
        lengths = np.asarray(batch.num_tokens_no_spec[:count], dtype=np.int64)
        stored = batch.token_ids_cpu
        gained = np.zeros((count, self._max_draft_length + 1), dtype=np.int32)
        for row, tokens in enumerate(self._gained):
            gained[row, : len(tokens)] = tokens

        def tokens_at(rows: Integers, positions: Integers) -> NDArray[np.int32]:
            index = positions - lengths[rows]
            tokens: NDArray[np.int32] = np.where(
                index < 0, stored[rows, positions], gained[rows, np.maximum(index, 0)]
            ).astype(np.int32)
            return tokens

        return self._copies.update(views, np.arange(count), tokens_at)

    def _score(
        self, draft: Draft, views: list[RequestView], metadata: CommonAttentionMetadata
    ) -> Tensor:
        """The companion's logits of a draft."""
        assert self.companion is not None
        names = [view.name for view in views]
        text_lengths = np.array([view.num_tokens for view in views], dtype=np.int64)
        drafted = drafted_requests(draft, names, text_lengths)
        stored_lengths = self._runner.input_batch.num_tokens_no_spec[: len(views)]
        stored = self._runner.input_batch.token_ids_cpu
        # Tokens that vLLM has not stored yet: those that a request just gained, then its draft.
        width = self._max_draft_length + 1 + draft.tokens.shape[1]
        new = np.zeros((len(views), width), dtype=np.int64)
        for row, gained in enumerate(self._gained):
            new[row, : len(gained)] = gained
        places = (text_lengths - stored_lengths)[:, None] + np.arange(draft.tokens.shape[1])
        np.put_along_axis(new, places, draft.tokens.cpu().numpy(), axis=1)

        def tokens_at(owners: Integers, positions: Integers) -> Tensor:
            index = positions - stored_lengths[owners]
            tokens = np.where(
                index < 0,
                stored[owners, np.minimum(positions, stored.shape[1] - 1)],
                new[owners, np.maximum(index, 0)],
            )
            return torch.from_numpy(tokens).to(self.device, self.input_ids.dtype)

        return self.companion.score(drafted, tokens_at, metadata, names)


def _controls(
    sampling_metadata: SamplingMetadata, batch_size: int, device: torch.device
) -> LogitControls:
    """The batch's temperatures, 0 for greedy requests. vLLM's draft ignores all other controls."""
    temperature = sampling_metadata.temperature
    if sampling_metadata.all_greedy or temperature is None:
        return LogitControls(torch.zeros(batch_size, device=device), all_greedy=True)
    temperature = temperature[:batch_size].float()
    zeroed = torch.where(temperature < GREEDY, 0.0, temperature)
    return LogitControls(zeroed, False, not sampling_metadata.all_random)
