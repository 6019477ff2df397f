"""What can be asked of an engine: checks of one request, before it is queued."""

from __future__ import annotations

from draftwise.errors import InvalidParameterError, PromptError
from draftwise.params import SamplingParams


def check_prompt(prompt_ids: list[int], max_model_len: int, vocab_size: int) -> None:
    """Refuse a prompt that cannot be continued.

    Args:
        prompt_ids: its tokens.
        max_model_len: longest prompt and output together.
        vocab_size: of the target.

    Raises:
        PromptError: it is empty, too long, or has tokens that the target does not have.
    """
    if not prompt_ids:
        raise PromptError("prompt", "is empty; give at least one token")
    if len(prompt_ids) >= max_model_len:
        raise PromptError(
            "prompt",
            f"has {len(prompt_ids)} tokens and the context holds {max_model_len} with at "
            "least one generated token; shorten it or raise max_model_len",
        )
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError("prompt", f"token ids must be integers, got {token!r}")
        if not 0 <= token < vocab_size:
            raise PromptError("prompt", f"token {token} is outside the vocabulary of {vocab_size}")


def check_params(params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """Refuse sampling parameters that mean nothing for this target.

    Args:
        params: of the request.
        vocab_size: of the target.
        has_tokenizer: whether the target's tokens can be read as text.

    Raises:
        InvalidParameterError: names a token that does not exist, or text that cannot be seen.
    """
    for name, tokens in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in tokens:
            if token >= vocab_size:
                raise InvalidParameterError(
                    name, f"token {token} is outside the vocabulary of {vocab_size}"
                )
    if params.stop and not has_tokenizer:
        raise InvalidParameterError(
            "stop", "the target has no tokenizer; use stop_token_ids instead"
        )
