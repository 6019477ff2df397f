"""What the server and the engine's process say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwise.errors import DraftwiseError
from draftwise.outputs import FinishReason, SpeculationStats, TokenLogprobs, TokenSource
from draftwise.params import RequestSpeculation, SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """Generate.

    Attributes:
        key: the server's number of the request.
        prompt: text of the prompt, ``None`` if tokens were given.
        prompt_ids: its tokens.
        params: how to draw.
        speculation: how to speculate.
    """

    key: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    speculation: RequestSpeculation


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for a request any more."""

    key: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Say how it speculates, after some changes perhaps.

    Attributes:
        call: number of the question.
        changes: see :meth:`draftwise.LLM.change_speculation`.
    """

    call: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ping:
    """Report something, so that the server knows that the engine responds."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


Command = Add | Cancel | Ask | Ping | Stop


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded.

    Attributes:
        name: of the target.
        max_model_len: longest prompt and output together.
        vocab_size: of the target.
        tokenizer: its tokenizer, ``None`` if it has none.
        fingerprints: of the models by role.
    """

    name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Any
    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """The models cannot be loaded, or a step failed; the process ends.

    Attributes:
        error: why.
        at_start: it never was ready.
    """

    error: DraftwiseError
    at_start: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What a request gained in a step.

    Attributes:
        key: of the request.
        token_ids: new tokens.
        texts: new text in pieces, each with where its token came from.
        logprobs: of the new tokens; ``None`` if they are not asked for.
        finish_reason: set in its last piece.
        error: why it failed, if it did.
        stats: how speculation went, in its last piece.
        prompt_logprobs: of the prompt, in its first piece; ``None`` if they are not asked for.
    """

    key: int
    token_ids: list[int]
    texts: list[tuple[str, TokenSource]]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: DraftwiseError | None = None
    stats: SpeculationStats | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """All new text."""
        return "".join(text for text, _ in self.texts)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step did.

    Attributes:
        seconds: by part of the step.
        num_requests: that gained tokens.
        num_tokens: gained.
        num_prompt_tokens: of prompts that were read.
        num_drafted: drafted tokens.
        num_judged: of them, those that a companion was asked about.
        verified: by position in the draft, how many were verified.
        accepted: by position in the draft, how many were accepted.
    """

    seconds: Mapping[str, float]
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    num_drafted: int
    num_judged: int
    verified: list[int]
    accepted: list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is after a step.

    Attributes:
        num_running: requests that have their place in the batch.
        num_waiting: requests that wait for one.
        cache_usage: share of the cache that is promised to requests.
        lenience: that holds now.
        calibration_error: of the policy's estimates of acceptance; ``None`` where it has none.
    """

    num_running: int
    num_waiting: int
    cache_usage: float
    lenience: float
    calibration_error: float | None


@dataclass(slots=True)
class Turn:
    """What came of some commands and a step.

    Attributes:
        added: keys of requests that were accepted.
        refused: requests that were not, and why.
        answers: to questions, by their number.
        pieces: what requests gained.
        step: what the step did; ``None`` if there was none.
        load: how busy the engine is now.
    """

    added: list[int] = field(default_factory=list)
    refused: list[tuple[int, DraftwiseError]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, Any] | DraftwiseError]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    step: StepFigures | None = None
    load: Load | None = None


Report = Ready | Failed | Turn
