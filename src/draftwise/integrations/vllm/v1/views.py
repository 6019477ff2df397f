"""The requests of a step, as the V1 model runner stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwise.integrations.vllm.steps import RequestView

# Temperatures below this are greedy, as in vLLM's sampler.
GREEDY = 1e-5


def request_views(
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
        greedy = params is None or params.temperature < GREEDY
        views.append(RequestView(name, num_tokens, max(num_output, 0), room, greedy))
    return views
