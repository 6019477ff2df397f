"""Drafts from the requests' texts instead of vLLM's n-grams (V1 model runner)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from draftwise.integrations.vllm.hooks import TextHooks
from draftwise.integrations.vllm.steps import verified_by_request
from draftwise.integrations.vllm.text_drafts import Texts
from draftwise.integrations.vllm.text_steering import TextSteering
from draftwise.integrations.vllm.v1.views import request_views


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

    def __init__(self, vllm_config: VllmConfig, runner: Any, steering: TextSteering) -> None:
        """Set up. The compiled search of the base class is not used.

        Args:
            vllm_config: a configuration with an ``ngram`` speculative config.
            runner: the V1 model runner.
            steering: drives the policy.
        """
        self.hooks = TextHooks(steering)
        self.skips_dummy_runs = False
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
        runner, batch_size = self._runner, len(sampled_token_ids)
        num_gained = [len(tokens) for tokens in sampled_token_ids]
        views = request_views(
            runner,
            num_tokens_no_spec[:batch_size].tolist(),
            num_gained,
            num_speculative_tokens,
            runner.max_model_len,
        )
        scheduled = runner.input_batch.spec_token_ids[:batch_size]
        verified = verified_by_request(
            [view.name for view in views], [len(tokens) for tokens in scheduled], num_gained
        )
        num_target_tokens = int(runner.query_start_loc.np[batch_size])
        texts = Texts(token_ids_cpu, np.arange(batch_size))
        return self.hooks.propose(views, verified, num_target_tokens, texts)
