"""What answers look like, for the schema that clients are made from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftwise.outputs import FinishReason, TokenSource
from draftwise.serving.health import HealthStatus

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Responses = dict[int | str, dict[str, Any]]


class ErrorContent(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorContent


class SpeculationUsage(BaseModel):
    """What speculation did."""

    lossless: bool
    num_steps: int
    num_drafted: int
    num_judged: int
    num_verified: int
    num_accepted: int
    mean_accepted_length: float
    acceptance_rate: float


class Usage(BaseModel):
    """How many tokens it took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: SpeculationUsage | None = None


class TokenText(BaseModel):
    """A piece of text and where its token came from."""

    text: str
    source: TokenSource


class Choice(BaseModel):
    """What all answers have."""

    index: int
    finish_reason: FinishReason | None
    tokens: list[TokenText] | None = None


class TextChoice(Choice):
    """An answer, or what a chunk adds to it."""

    text: str
    logprobs: dict[str, Any] | None


class Completion(BaseModel):
    """Answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class FunctionCalled(BaseModel):
    """The function of a call."""

    name: str
    arguments: str = Field(description="A JSON object.")


class CallMade(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCalled


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[CallMade] | None = None


class ChatChoice(Choice):
    """An answer in a chat."""

    finish_reason: FinishReason | Literal["tool_calls"] | None  # type: ignore[assignment]
    message: AnswerMessage
    logprobs: dict[str, Any] | None


class ChatCompletion(BaseModel):
    """Answers in a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """Whether requests are answered now."""

    status: HealthStatus
    reason: str | None = Field(description="Why not; null while they are.")


class Version(BaseModel):
    """Of the server."""

    version: str


class Tokens(BaseModel):
    """Tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    """Text of tokens."""

    prompt: str


class PolicyCard(BaseModel):
    """A policy."""

    name: str
    description: str
    lossless: bool
    usable: bool = Field(description="All that it needs is there.")


class SpeculationState(BaseModel):
    """How the server speculates."""

    enabled: bool
    policy: str
    policy_options: dict[str, Any] = {}
    num_speculative_tokens: int = 0
    lenience: float | dict[str, float] = 1.0
    target: str
    draft: str | None
    companion: str | None
    policies: list[PolicyCard]


class StatisticsState(BaseModel):
    """What the engine did lately."""

    model_config = ConfigDict(extra="forbid")

    time: float = Field(description="Unix time in seconds.")
    uptime_seconds: float
    num_running: int
    num_waiting: int
    cache_usage: float
    lenience: float | None
    calibration_error: float | None
    goodput: float = Field(description="Tokens per second.")
    step_seconds: float | None
    mean_accepted_length: float | None = Field(description="Tokens per request and step.")
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    time_split: dict[str, float] = Field(description="Seconds per step by part.")


_EVENT = {
    "type": "object",
    "description": "An event; its data is a chunk as JSON, an error, or [DONE] in the end.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def _of(model: type[BaseModel], description: str, *, streamed: bool = False) -> Responses:
    response: dict[str, Any] = {"model": model, "description": description}
    if streamed:
        response["content"] = {"text/event-stream": {"schema": _EVENT}}
    return {200: response}


def _errors(**descriptions: str) -> Responses:
    return {
        int(status.removeprefix("s")): {"model": ErrorBody, "description": text}
        for status, text in descriptions.items()
    }


# 422 is what the framework would say; here a body that does not fit is answered with 400.
REFUSALS: Responses = _errors(
    s400="The request is wrong; names the field.",
    s401="The key is missing or wrong.",
    s404="There is no such model.",
    s413="The body is too long.",
    s415="The body is not JSON by its headers, or is compressed.",
    s503="There is no engine now.",
)
_BUSY: Responses = _errors(
    s429="Too many requests wait; Retry-After says when to ask again.",
    s500="The model gave no numbers.",
    s504="The answer was not complete in time.",
)
_LATE: Responses = _errors(s504="The engine did not answer in time.")
COMPLETION = _of(Completion, "The answers, or a stream of them.", streamed=True) | _BUSY
CHAT = _of(ChatCompletion, "The answers, or a stream of them.", streamed=True) | _BUSY
MODEL = _of(ModelCard, "The model.")
MODELS = _of(ModelList, "The models.")
VERSION = _of(Version, "The version.")
HEALTH = _of(Health, "They are.") | {503: {"model": Health, "description": "They are not."}}
METRICS: Responses = {
    200: {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
TOKENS = _of(Tokens, "The tokens.") | _LATE
TEXT = _of(Text, "The text.") | _LATE
SPECULATION = _of(SpeculationState, "How the server speculates now.") | _LATE
STATISTICS = _of(StatisticsState, "What happened lately.")
