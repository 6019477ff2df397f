"""Bodies of requests, in OpenAI's form with the extensions that vLLM's clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftwise.errors import InvalidParameterError
from draftwise.params import (
    LARGEST_TEMPERATURE,
    MAX_LOGPROBS,
    REPETITION_PENALTIES,
    RequestSpeculation,
    SamplingParams,
)
from draftwise.structured_outputs import StructuredOutputs

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Body(BaseModel):
    """A body; keys that mean nothing here are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


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
    choice: list[str] | None = None
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


class Sampling(Body):
    """What both kinds of completion share."""

    model: str | None = Field(None, description="A model of `GET /v1/models`.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    temperature: float | None = Field(1.0, ge=0, le=LARGEST_TEMPERATURE)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=-1, description="0 and -1 are off.")
    min_p: float | None = Field(0.0, ge=0, le=1)
    logit_bias: dict[str, float] | None = Field(
        None, description="Token id to a number from -100 to 100."
    )
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    structured_outputs: Form | None = Field(
        None, description="What form the answer has; `response_format` of a chat is the same."
    )
    return_tokens: bool = Field(
        False, description="Say of each piece of text where it came from: draft or target."
    )
    user: str | None = Field(None, description="Not looked at.")
    metadata: dict[str, Any] | None = Field(None, description="Not looked at.")

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

    def form(self) -> StructuredOutputs | None:
        """What form the answer has.

        Raises:
            InvalidParameterError: it is given wrongly.
        """
        return None if self.structured_outputs is None else self.structured_outputs.checked()

    def sampling(self, max_tokens: int, number: int) -> SamplingParams:
        """How one answer is drawn.

        Args:
            max_tokens: of the answer.
            number: of the answer among those of the same prompt; each has a seed of its own.

        Raises:
            InvalidParameterError: a value is out of its range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_bias(self.logit_bias or {}),
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            # Negative seeds are allowed by clients; a seed is 64 bits, whatever they stand for.
            logprobs=self.num_logprobs(),
            structured_outputs=self.form(),
            seed=None if self.seed is None else (self.seed + number) % (1 << 64),
        )


class CompletionBody(Sampling):
    """Body of `POST /v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] = Field(
        description="Text, tokens, or a list of prompts."
    )
    max_tokens: int | None = Field(16, ge=1)
    echo: bool = Field(False, description="Write the prompt before the answer.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, description="Only the same as `n`.")
    suffix: None = None

    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside each one; ``None`` for no log-probabilities."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each prompt.

        Raises:
            InvalidParameterError: there is none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidParameterError("prompt", "is empty; give some text or at least one token")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat; what else it holds is the template's business."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """With the text in one piece, as templates want it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class JsonSchema(Body):
    """A schema that the answer follows."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(Sampling):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="Without it, what the context holds.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside each one; ``None`` for no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidParameterError("top_logprobs", "needs logprobs: true")
            return None
        return self.top_logprobs or 0

    def form(self) -> StructuredOutputs | None:
        """What form the answer has.

        Raises:
            InvalidParameterError: it is given wrongly.
        """
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return super().form()
        if self.structured_outputs is not None:
            raise InvalidParameterError(
                "structured_outputs", "says the same as response_format; give one of them"
            )
        if wanted.type == "json_object":
            return StructuredOutputs(json_object=True)
        if wanted.json_schema is None:
            raise InvalidParameterError("response_format.json_schema", "is missing")
        return StructuredOutputs(json_schema=wanted.json_schema.json_schema)


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class SpeculationChange(Body):
    """Body of `PATCH /v1/speculation`; what is not named stays as it is."""

    policy: str | None = None
    policy_options: dict[str, Any] | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=64)
    lenience: float | dict[str, float] | None = Field(
        None, description="A number, or a rule by the number of waiting requests."
    )

    def changes(self) -> dict[str, Any]:
        """What is named.

        Raises:
            InvalidParameterError: nothing is.
        """
        named = self.model_dump(exclude_none=True)
        if not named:
            raise InvalidParameterError("speculation", "names nothing to change")
        return named


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in given.items():
        if not token.isdecimal():
            raise InvalidParameterError("logit_bias", f"{token!r} is no token id")
        bias[int(token)] = value
    return bias
