"""What a server is started with."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from draftwise.errors import InvalidParameterError
from draftwise.params import SpeculationConfig
from draftwise.serving.tools.registry import PARSERS

_MEBIBYTE = 1 << 20
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class EngineSettings:
    """What the engine is made of, again after every restart; see :class:`draftwise.LLM`.

    Attributes:
        target: a folder, a hub id or a zoo name.
        speculation: how to speculate; ``None`` for target-only decoding.
        dtype: of the weights.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        max_batch_size: requests that run at once; more wait.
        max_model_len: longest prompt and output together; ``None`` for the target's own.
        max_chunk_tokens: prompt tokens processed per step.
        cache_gib: memory for keys and values; ``None`` for half of what is free.
        trust_remote_code: run code that comes with a model.
        overlap: draft for one half of the batch while the target verifies the other.
        draft_replicas: processes that draft.
        num_threads: to compute with on a CPU; ``None`` for PyTorch's choice.
    """

    target: str
    speculation: SpeculationConfig | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int = 32
    max_model_len: int | None = None
    max_chunk_tokens: int = 512
    cache_gib: float | None = None
    trust_remote_code: bool = False
    overlap: bool | None = None
    draft_replicas: int = 1
    num_threads: int | None = None


@dataclass(frozen=True)
class ServerSettings:
    """How the server treats its clients.

    Attributes:
        served_model_name: what clients call the model; ``None`` for the target's name.
        api_keys: one of them must come with every request to ``/v1``; none: everybody may ask.
        max_queue: requests that may wait beside those that run; more are refused with 429.
        max_body_bytes: longest body of a request.
        max_prompt_tokens: longest prompt; ``None`` for what the context holds.
        max_choices: most answers of one request, over all its prompts.
        request_timeout: seconds from arrival to the last token.
        drain_timeout: seconds that running requests have to end when the server is told to stop.
        chat_template: Jinja text in place of the tokenizer's own; ``None`` for its own.
        tool_call_parser: of calls that the model makes of its own accord, ``"hermes"`` or
            ``"llama3_json"``; ``None`` for what the chat template is recognised to ask for.
        allowed_origins: web pages of these origins may ask from a browser; ``"*"`` for all.
        step_timeout: seconds after which an engine that does not respond is replaced.

    Raises:
        InvalidParameterError: a value lies outside its range.
    """

    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_queue: int = 128
    max_body_bytes: int = 8 * _MEBIBYTE
    max_prompt_tokens: int | None = None
    max_choices: int = 128
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    chat_template: str | None = None
    tool_call_parser: str | None = None
    allowed_origins: tuple[str, ...] = ()
    step_timeout: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_queue", 0),
            ("max_body_bytes", 1),
            ("max_prompt_tokens", 1),
            ("max_choices", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidParameterError(name, f"must be at least {least}, got {value!r}")
        for name in ("request_timeout", "drain_timeout", "step_timeout"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InvalidParameterError(name, f"must be positive seconds, got {value!r}")
        if not all(self.api_keys):
            raise InvalidParameterError("api_key", "is empty")
        if self.tool_call_parser not in (None, *PARSERS):
            raise InvalidParameterError(
                "tool_call_parser",
                f"{self.tool_call_parser!r} is unknown; known: {', '.join(PARSERS)}",
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidParameterError(
                    "allowed_origins",
                    f"{origin!r} is no origin; give SCHEME://HOST[:PORT] without a path, or *",
                )
