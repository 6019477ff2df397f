"""What both kinds of completion share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from draftwise.params import (
    LARGEST_TEMPERATURE,
    REPETITION_PENALTIES,
    RequestSpeculation,
    SamplingParams,
)
from draftwise.serving.schemas.body import (
    Body,
    TokenId,
    check_strings,
    quoted,
    wrong,
)
from draftwise.structured_outputs import StructuredOutputs

MAX_STOP_STRINGS, LONGEST_STOP_STRING = 32, 256
MAX_STOP_TOKENS = 1024
MAX_BIASES, LARGEST_BIAS = 1024, 100
MAX_CHOICES = 1024
IGNORED = "Accepted and ignored."
Ignored = Annotated[Any, Field(description=IGNORED)]


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Ignored = None


class Speculation(Body):
    """How one request speculates, where it differs from the server."""

    enabled: bool = True
    policy: str | None = Field(None, description="One of those in `GET /v1/speculation`.")
    num_speculative_tokens: int | None = Field(None, ge=0, le=64)
    lenience: float | None = Field(
        None, gt=0, le=1, description="Below 1 the answer is not exactly the target's."
    )


class Form(Body):
    """What form an answer has, given in exactly one way."""

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = Field(None, max_length=MAX_CHOICES, fail_fast=True)
    grammar: str | None = Field(None, description="Lark's, as llguidance knows it.")

    def checked(self) -> StructuredOutputs:
        """As the engine wants it.

        Raises:
            InvalidParameterError: none or several ways are given, or a value is wrong.
        """
        choice = None if self.choice is None else tuple(self.choice)
        return StructuredOutputs(
            self.json_schema, self.json_object, self.regex, choice, self.grammar
        )


def _stop(value: Any) -> list[str]:
    """The stop strings; empty ones, which some clients send for none, are left out."""
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
    """Token id to bias; JSON has strings for keys."""
    if not isinstance(value, dict):
        raise wrong(f"must be an object from token ids to numbers, got {quoted(value)}")
    if len(value) > MAX_BIASES:
        raise wrong(f"has {len(value)} tokens; at most {MAX_BIASES} are allowed")
    bias: dict[int, float] = {}
    for token, each in value.items():
        if not token.isascii() or not token.isdecimal() or len(token) > len(str(1 << 31)):
            raise wrong(f"{quoted(token)} is no token id")
        number = isinstance(each, int | float) and not isinstance(each, bool)
        # Comparing also refuses what is no number at all, and integers too long for a float.
        if not number or not -LARGEST_BIAS <= each <= LARGEST_BIAS:
            raise wrong(
                f"the bias of token {token} must be a number from -{LARGEST_BIAS} to "
                f"{LARGEST_BIAS}, got {quoted(each)}"
            )
        bias[int(token)] = float(each)
    return bias


class Sampling(Body):
    """What both kinds of completion share."""

    model: str | None = Field(None, description="A model of `GET /v1/models`.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    temperature: float = Field(1.0, ge=0, le=LARGEST_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1 are off.")
    min_p: float = Field(0.0, ge=0, le=1)
    logit_bias: Annotated[
        dict[int, float],
        PlainValidator(_bias, json_schema_input_type=dict[str, float]),
        Field(
            default_factory=dict,
            description="Token id to a number from -100 to 100; at most 1024 tokens.",
        ),
    ]
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[
        list[str],
        PlainValidator(_stop, json_schema_input_type=str | list[str]),
        Field(
            default_factory=list,
            description="At most 32 strings of at most 256 characters.",
        ),
    ]
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MAX_STOP_TOKENS, fail_fast=True
    )
    ignore_eos: bool = False
    min_tokens: int = Field(
        0,
        ge=0,
        description="No stop token and no stop string ends the answer before this many tokens.",
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    structured_outputs: Form | None = Field(
        None, description="What form the answer has; `response_format` of a chat is the same."
    )
    return_tokens: bool = Field(
        False, description="Say of each piece of text where it came from: draft or target."
    )
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    def own_speculation(self) -> RequestSpeculation:
        """How the request speculates.

        Raises:
            InvalidParameterError: a value is out of its range.
        """
        if self.speculation is None:
            return RequestSpeculation()
        return RequestSpeculation(**self.speculation.model_dump())

    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside each one; ``None`` for no log-probabilities."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt."""
        return None

    def form(self) -> StructuredOutputs | None:
        """What form the answer has.

        Raises:
            InvalidParameterError: it is given wrongly.
        """
        return None if self.structured_outputs is None else self.structured_outputs.checked()

    def form_field(self) -> str | None:
        """Which field says it; ``None`` for ``structured_outputs``."""
        return None

    def sampling(self, max_tokens: int, number: int) -> SamplingParams:
        """How one answer is drawn.

        Args:
            max_tokens: of the answer.
            number: of the answer among those of the same prompt; each has a seed of its own.

        Raises:
            InvalidParameterError: a value is out of its range.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.num_prompt_logprobs(),
            structured_outputs=self.form(),
            # Negative seeds are allowed by clients; a seed is 64 bits, whatever they stand for.
            seed=None if self.seed is None else (self.seed + number) % (1 << 64),
        )
