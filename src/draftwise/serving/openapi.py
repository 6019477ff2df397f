"""Models of response bodies for the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftwise.outputs import FinishReason, TokenSource
from draftwise.serving.health import HealthStatus

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Responses = dict[int | str, dict[str, Any]]


class ErrorContent(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """An error response."""

    error: ErrorContent


class SpeculationUsage(BaseModel):
    """Counts of speculative decoding."""

    lossless: bool
    num_steps: int
    num_drafted: int
    num_scored: int
    num_verified: int
    num_accepted: int
    mean_accepted_length: float
    acceptance_rate: float
    seconds_saved: float | None = Field(
        description="Seconds that drafts saved, estimated from the times of steps without drafts. "
        "Negative if drafts cost time; null if such steps were not measured yet."
    )


class PromptTokensDetails(BaseModel):
    """Counts of prompt tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: SpeculationUsage | None = None


class SpeculativeDecodingMetrics(BaseModel):
    """Acceptance of the drafts of a response, in the form of vLLM."""

    mean_acceptance_length: float = Field(
        description="Tokens of a step with a draft: those accepted, and the target's own."
    )
    draft_acceptance_rate: float
    acceptance_histogram: list[int] = Field(
        description="Number of drafts of which 0, 1, 2, … tokens were accepted."
    )
    num_spec_steps: int = Field(description="Number of steps with a draft.")
    num_accepted_draft_tokens: int
    num_draft_tokens: int = Field(description="Number of verified tokens.")
    num_spec_tokens: int = Field(description="Maximum length of a draft.")
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class ResponseMetrics(BaseModel):
    """Metrics of a response with a single answer, if the server reports them."""

    speculative_decoding: SpeculativeDecodingMetrics


class TokenText(BaseModel):
    """A piece of text and how its token was generated."""

    text: str
    source: TokenSource


class Choice(BaseModel):
    """Fields shared by text and chat choices."""

    index: int
    finish_reason: FinishReason | None
    tokens: list[TokenText] | None = None


class TextChoice(Choice):
    """A text choice, or the part of it in a chunk."""

    text: str
    logprobs: dict[str, Any] | None


class Completion(BaseModel):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class FunctionCalled(BaseModel):
    """Name and arguments of a function call."""

    name: str
    arguments: str = Field(description="Arguments as a JSON object.")


class CallMade(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCalled


class AnswerMessage(BaseModel):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[CallMade] | None = None


class ChatChoice(Choice):
    """A chat choice."""

    finish_reason: FinishReason | Literal["tool_calls"] | None  # type: ignore[assignment]
    message: AnswerMessage
    logprobs: dict[str, Any] | None


class ChatCompletion(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics | None = None
    service_tier: Literal["default"] | None = Field(
        None, description="Set if the request has a service tier."
    )


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    eos_token_ids: list[int] = Field(description="Tokens that end a text.")
    has_chat_template: bool = Field(description="Whether chats can be sent.")


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """Health of the server."""

    status: HealthStatus
    reason: str | None = Field(description="Why the server is not healthy; null if it is.")


class Version(BaseModel):
    """Version of the server."""

    version: str


class Tokens(BaseModel):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(BaseModel):
    """Text of token ids."""

    prompt: str


class PolicyCard(BaseModel):
    """A policy."""

    name: str
    description: str
    lossless: bool
    usable: bool = Field(description="Whether the models and profiles it needs are loaded.")


class SpeculationState(BaseModel):
    """Speculation settings of the server."""

    enabled: bool
    policy: str
    policy_options: dict[str, Any] = {}
    num_speculative_tokens: int = 0
    max_num_speculative_tokens: int = Field(0, description="The largest accepted value.")
    lenience: float | dict[str, float] = 1.0
    target: str
    draft: str | None
    companion: str | None
    policies: list[PolicyCard]


class StatisticsState(BaseModel):
    """Recent statistics of the engine."""

    model_config = ConfigDict(extra="forbid")

    status: str = Field(description="As in the response of /health.")
    reason: str | None = Field(description="Why the status is not `ok`.")
    time: float = Field(description="Unix time in seconds.")
    uptime_seconds: float
    num_running: int
    num_waiting: int
    cache_usage: float
    lenience: float | None
    guard_balance: float | None = Field(
        description="Steps without drafts that later drafts may cost, at most 16."
    )
    prefix_cache_hit_rate: float | None = Field(
        description="Share of the last half minute's prompt tokens found in the prefix cache."
    )
    goodput: float = Field(description="Generated tokens per second.")
    step_seconds: float | None
    mean_accepted_length: float | None = Field(description="Generated tokens per request and step.")
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    time_split: dict[str, float] = Field(description="Seconds per step by phase of the step.")


_EVENT = {
    "type": "object",
    "description": "An event; its data is a chunk as JSON, an error, or [DONE] at the end.",
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


# The framework's default for invalid bodies is 422; this server answers them with 400.
REFUSALS: Responses = _errors(
    s400="The request is invalid; the error names the field.",
    s401="The API key is missing or invalid.",
    s404="The model does not exist.",
    s413="The body is too large.",
    s415="The content type is not JSON, or the body is compressed.",
    s503="The engine is not available.",
)
_GENERATION_ERRORS: Responses = _errors(
    s429="Too many requests wait; Retry-After says when to retry.",
    s500="The model computed NaN logits.",
    s504="The answer was not complete before the request timeout.",
)
_TIMEOUT: Responses = _errors(s504="The server did not respond before the request timeout.")
COMPLETION = _of(Completion, "The completion, or its stream.", streamed=True) | _GENERATION_ERRORS
CHAT = _of(ChatCompletion, "The completion, or its stream.", streamed=True) | _GENERATION_ERRORS
MODEL = _of(ModelCard, "The model.")
MODELS = _of(ModelList, "The models.")
VERSION = _of(Version, "The version.")
HEALTH = _of(Health, "The server is healthy.") | {
    503: {"model": Health, "description": "The server is not healthy."}
}
METRICS: Responses = {
    200: {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
TOKENS = _of(Tokens, "The token ids.") | _TIMEOUT
TEXT = _of(Text, "The text.") | _TIMEOUT
SPECULATION = _of(SpeculationState, "The current speculation settings.") | _TIMEOUT
STATISTICS = _of(StatisticsState, "The recent statistics.")
