"""Messages between the server and the process of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwise.errors import DraftwiseError
from draftwise.outputs import FinishReason, SpeculationStats, TokenLogprobs, TokenSource
from draftwise.params import SamplingParams
from draftwise.speculation import RequestSpeculation


@dataclass(frozen=True, slots=True)
class Add:
    """Add a request.

    Attributes:
        key: key of the request, unique within the server.
        prompt: text of the prompt; ``None`` if token ids were given.
        prompt_ids: token ids of the prompt.
        params: sampling parameters.
        speculation: speculation settings.
    """

    key: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    speculation: RequestSpeculation


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request."""

    key: int


@dataclass(frozen=True, slots=True)
class UpdateSpeculation:
    """Change speculation settings and report the new ones.

    Attributes:
        call: number of the call, repeated in its result.
        changes: arguments of :meth:`draftwise.LLM.change_speculation`; empty to change nothing.
    """

    call: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for a report, which shows that the engine responds."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


Command = Add | Cancel | UpdateSpeculation | Ping | Stop


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded.

    Attributes:
        name: name of the target.
        max_model_len: maximum number of tokens of a prompt and its output together.
        max_request_tokens: the same, if the memory of the caches is considered too.
        vocab_size: vocabulary size of the target.
        tokenizer: tokenizer of the target; ``None`` if it has none.
        eos_token_ids: tokens that end a text of the target, ascending.
        fingerprints: fingerprints of the models by role.
        warnings: warnings about the models, one line each.
    """

    name: str
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    tokenizer: Any
    eos_token_ids: Sequence[int]
    fingerprints: Mapping[str, str]
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The models cannot be loaded, or a step failed. The process ends.

    Attributes:
        error: the error.
        at_start: whether it occurred before :class:`Ready`.
    """

    error: DraftwiseError
    at_start: bool


@dataclass(slots=True)
class DraftSteps:
    """Verified and accepted tokens of the drafts of one request, in their order.

    Attributes:
        max_tokens: maximum number of drafted tokens in a step, by the settings of the engine.
        verified: verified tokens of each draft of which tokens were verified.
        accepted: those of them that were accepted.
    """

    max_tokens: int
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens and text that one step generated for a request.

    Attributes:
        key: key of the request.
        token_ids: new token ids.
        texts: new text, in parts with the source of their tokens. Text that may still change, and
            that of a possible stop string, comes with a later piece.
        logprobs: log-probabilities of the new tokens; ``None`` if they were not requested.
        finish_reason: set in the last piece of a request.
        error: the error, if the request failed.
        stats: counts of speculative decoding; set in the last piece.
        prompt_logprobs: log-probabilities of the prompt; set in the first piece if they were
            requested.
        num_cached_tokens: prompt tokens that were found in the prefix cache; set in the last piece.
        drafts: counts of each draft; set in the last piece if the engine has drafts.
    """

    key: int
    token_ids: list[int]
    texts: list[tuple[str, TokenSource]]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: DraftwiseError | None = None
    stats: SpeculationStats | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    drafts: DraftSteps | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for text, _ in self.texts)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Times and counts of one call of :meth:`Engine.step`.

    Overlapped steps may end in a later call than they begin, or two in one call.

    Attributes:
        seconds: duration of each phase of the steps that ended.
        num_requests: number of requests that received tokens.
        num_tokens: number of generated tokens.
        num_prompt_tokens: number of processed prompt tokens.
        num_prefix_queries: number of prompt tokens that were looked up in the prefix cache.
        num_prefix_hits: number of prompt tokens that were found there.
        num_drafted: number of drafted tokens.
        num_scored: number of drafted tokens scored by the companion.
        verified: number of verified tokens by position in the draft.
        accepted: number of accepted tokens by position in the draft.
        num_steps: number of steps that ended.
    """

    seconds: Mapping[str, float]
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_drafted: int
    num_scored: int
    verified: list[int]
    accepted: list[int]
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of the engine after a step.

    Attributes:
        num_running: number of running requests.
        num_waiting: number of waiting requests.
        cache_usage: fraction of the KV cache that is reserved for requests.
        lenience: current lenience.
        guard_balance: steps without drafts that later drafts may cost; ``None`` without a guard.
    """

    num_running: int
    num_waiting: int
    cache_usage: float
    lenience: float
    guard_balance: float | None


@dataclass(slots=True)
class EngineOutputs:
    """Results of the commands received since the last report, and of at most one call of a step.

    Attributes:
        added: keys of requests that were added to the engine.
        refused: keys of requests that were rejected, each with its error.
        answers: results of :class:`UpdateSpeculation`, each with its call number.
        pieces: pieces of the requests that received tokens or ended.
        step: times and counts of the call; ``None`` if no step ended in it.
        load: load of the engine.
    """

    added: list[int] = field(default_factory=list)
    refused: list[tuple[int, DraftwiseError]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, Any] | DraftwiseError]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    step: StepStats | None = None
    load: EngineLoad | None = None


Report = Ready | Failed | EngineOutputs
