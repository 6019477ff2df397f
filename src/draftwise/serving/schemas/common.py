"""Fields shared by the bodies of text and chat completions."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from draftwise.params import LARGEST_TEMPERATURE, REPETITION_PENALTIES, SamplingParams
from draftwise.serving.schemas.body import (
    Body,
    Neutral,
    TokenId,
    check_strings,
    quoted,
    wrong,
)
from draftwise.speculation import RequestSpeculation
from draftwise.structured_outputs import StructuredOutputs

MAX_STOP_STRINGS, LONGEST_STOP_STRING = 32, 256
MAX_STOP_TOKENS = 1024
MAX_BIASES, LARGEST_BIAS = 1024, 100
MAX_CHOICES = 1024
IGNORED = "Accepted and ignored."
Ignored = Annotated[Any, Field(description=IGNORED)]


class StreamOptions(Body):
    """Additional contents of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[
        None,
        Neutral("streams are not padded; leave it out or set it to false", False),
    ] = None


class Speculation(Body):
    """Speculation settings of one request, which override those of the server."""

    enabled: bool = True
    policy: str | None = Field(
        None, description="Name of a policy listed by `GET /v1/speculation`."
    )
    num_speculative_tokens: int | None = Field(
        None, ge=0, le=64, description="At most that of `GET /v1/speculation`."
    )
    lenience: float | None = Field(
        None, gt=0, le=1, description="With values below 1 the answer is not lossless."
    )
    draft: str | None = Field(
        None, description="The only draft of the server that the request uses, such as `suffix`."
    )


class StructuredOutputsBody(Body):
    """Grammar of an answer. Exactly one field must be set."""

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = Field(None, max_length=MAX_CHOICES, fail_fast=True)
    grammar: str | None = Field(
        None, description="Context-free grammar in llguidance's variant of Lark."
    )

    def to_params(self) -> StructuredOutputs:
        """Convert to parameters of the engine.

        Raises:
            InvalidParameterError: no field or several fields are set, or a value is invalid.
        """
        return StructuredOutputs(**self.model_dump())


def _stop(value: Any) -> list[str]:
    """Validate stop strings and drop empty ones, which some clients send by default."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong(f"must be a string or a list of strings, got {quoted(value)}")
    if len(texts) > MAX_STOP_STRINGS:
        raise wrong(f"has {len(texts)} strings; at most {MAX_STOP_STRINGS} are allowed")
    check_strings(texts)
    for index, text in enumerate(texts):
        if len(text) > LONGEST_STOP_STRING:
            raise wrong(
                f"has {len(text)} characters; at most {LONGEST_STOP_STRING} are allowed",
                f"[{index}]",
            )
    return [text for text in texts if text]


def _bias(value: Any) -> dict[int, float]:
    """Validate a mapping from token id to bias; the keys of JSON objects are strings."""
    if not isinstance(value, dict):
        raise wrong(f"must be an object from token ids to numbers, got {quoted(value)}")
    if len(value) > MAX_BIASES:
        raise wrong(f"has {len(value)} tokens; at most {MAX_BIASES} are allowed")
    bias: dict[int, float] = {}
    for token, each in value.items():
        if not token.isascii() or not token.isdecimal() or len(token) > len(str(1 << 31)):
            raise wrong(f"{quoted(token)} is not a token id")
        number = isinstance(each, int | float) and not isinstance(each, bool)
        # The comparison also rejects NaN, and integers that are too large for a float.
        if not number or not -LARGEST_BIAS <= each <= LARGEST_BIAS:
            raise wrong(
                f"the bias of token {token} must be a number from -{LARGEST_BIAS} to "
                f"{LARGEST_BIAS}, got {quoted(each)}"
            )
        bias[int(token)] = float(each)
    return bias


class Sampling(Body):
    """Fields shared by text and chat completions."""

    model: str | None = Field(None, description="Name of a model listed by `GET /v1/models`.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    temperature: float = Field(1.0, ge=0, le=LARGEST_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1 disable the filter.")
    min_p: float = Field(0.0, ge=0, le=1)
    logit_bias: Annotated[
        dict[int, float],
        PlainValidator(_bias, json_schema_input_type=dict[str, float]),
        Field(
            default_factory=dict,
            description="Mapping from token id to a number from -100 to 100; at most 1024 tokens.",
        ),
    ]
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[
        list[str],
        PlainValidator(_stop, json_schema_input_type=str | list[str]),
        Field(
            default_factory=list,
            description="At most 32 strings of at most 256 characters, which may contain special "
            "tokens.",
        ),
    ]
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MAX_STOP_TOKENS, fail_fast=True
    )
    ignore_eos: bool = False
    min_tokens: int = Field(
        0,
        ge=0,
        description="Number of tokens before which no stop token or stop string ends the answer.",
    )
    cache_salt: str = Field(
        "",
        max_length=256,
        description="Only requests with the same salt and API key share cached prefixes.",
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    structured_outputs: StructuredOutputsBody | None = Field(
        None, description="Grammar of the answer; in a chat, use this or `response_format`."
    )
    return_tokens: bool = Field(
        False, description="Report for each piece of text how its token was generated."
    )
    user: Ignored = None
    metadata: Ignored = None
    store: Annotated[
        None,
        Neutral("answers are not stored; leave it out or set it to false", False),
    ] = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    def own_speculation(self) -> RequestSpeculation:
        """Speculation settings of the request.

        Raises:
            InvalidParameterError: a value is out of range.
        """
        if self.speculation is None:
            return RequestSpeculation()
        return RequestSpeculation(**self.speculation.model_dump())

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; ``None`` for no logprobs."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report per prompt token; ``None`` for no logprobs."""
        return None

    def grammar(self) -> StructuredOutputs | None:
        """Grammar of the answer; ``None`` for unconstrained text.

        Raises:
            InvalidParameterError: the grammar is invalid.
        """
        return None if self.structured_outputs is None else self.structured_outputs.to_params()

    def grammar_field(self) -> str | None:
        """Field that defines the grammar; ``None`` for ``structured_outputs``."""
        return None

    def sampling(self, max_tokens: int, number: int, client: str = "") -> SamplingParams:
        """Sampling parameters of one answer, without its grammar.

        Args:
            max_tokens: maximum number of tokens of the answer.
            number: index of the answer among those to the same prompt, added to the seed.
            client: identifies the client, which shares no cached prefixes with others.

        Raises:
            InvalidParameterError: a value is out of range.
        """
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        values["cache_salt"] = f"{client}\0{self.cache_salt}" if client else self.cache_salt
        if self.seed is not None:
            # Clients may send negative seeds, which wrap around to 64 bits.
            values["seed"] = (self.seed + number) % (1 << 64)
        return SamplingParams(
            **values,
            max_tokens=max_tokens,
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
        )


# Sampling parameters that both kinds of bodies have, except the grammar.
_SAMPLING_FIELDS = {item.name for item in fields(SamplingParams)} & set(Sampling.model_fields) - {
    "structured_outputs"
}
