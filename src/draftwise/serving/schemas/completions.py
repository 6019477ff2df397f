"""Body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from draftwise.errors import InvalidParameterError
from draftwise.params import MAX_LOGPROBS
from draftwise.serving.schemas.body import (
    Neutral,
    TokenId,
    check_strings,
    check_token_ids,
    quoted,
    wrong,
)
from draftwise.serving.schemas.common import Sampling

MAX_PROMPTS = 4096
Prompts = str | list[TokenId] | list[str] | list[list[TokenId]]
_ACCEPTED = (
    "a string, a list of token ids, or a list of either: strings or lists of token ids, not mixed"
)


def _prompt(value: Any) -> Any:
    """Validate a prompt by the type of its first element, so that errors name the invalid item."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(f"must be {_ACCEPTED}; got {quoted(value)}")
    first = value[0] if value else ""
    if not isinstance(first, int) and len(value) > MAX_PROMPTS:
        raise wrong(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if isinstance(first, str):
        check_strings(value)
    elif isinstance(first, list):
        for index, each in enumerate(value):
            if not isinstance(each, list):
                raise wrong(f"must be a list of token ids, got {quoted(each)}", f"[{index}]")
            check_token_ids(each, f"[{index}]")
    elif isinstance(first, int):
        check_token_ids(value)
    else:
        raise wrong(f"must be a string, a token id or a list, got {quoted(first)}", "[0]")
    return value


class CompletionBody(Sampling):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        Prompts,
        PlainValidator(_prompt, json_schema_input_type=Prompts),
        Field(description="Text, token ids, or a list of prompts."),
    ]
    max_tokens: int = Field(16, ge=0, description="0 generates nothing.")
    echo: bool = Field(False, description="Return the prompt before the answer.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report the log-probabilities of each token and of this many most likely "
        "tokens at its position; with `echo`, also for the prompt.",
    )
    best_of: int | None = Field(None, ge=1, description="Must equal `n`.")
    suffix: Annotated[
        None,
        Neutral("text that follows the completion is not considered; leave it out", ""),
    ] = None

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; ``None`` for no logprobs."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report per prompt token; ``None`` without ``echo``."""
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            InvalidParameterError: there is no prompt.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidParameterError("prompt", "is empty; give some text or at least one token")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
