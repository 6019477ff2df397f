"""Settings of a server and its engine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from draftwise.errors import InvalidParameterError
from draftwise.serving.acceptance import LEVELS, NONE
from draftwise.serving.tools.tagged import PARSERS
from draftwise.speculation import SpeculationConfig

_MEBIBYTE = 1 << 20
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine, used at every start; see :class:`draftwise.LLM`.

    Attributes:
        target: a folder, a hub id or a zoo name.
        speculation: speculation settings; ``None`` for target-only decoding.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``.
        device: ``auto``, ``cpu`` or ``cuda``.
        max_batch_size: maximum number of requests that run at once.
        max_model_len: maximum number of tokens of a prompt and its output together; ``None`` for
            the context length of the target.
        max_chunk_tokens: maximum number of prompt tokens processed per step.
        cache_gib: size of the KV cache in GiB; ``None`` for half of the free memory.
        trust_remote_code: allow models to run code from their repositories.
        overlap: draft for one half of the batch while the target verifies the other half; ``None``
            for what the latency profile says.
        draft_replicas: number of processes that draft, each for its share of the batch.
        num_threads: number of CPU threads; ``None`` for PyTorch's default.
        enable_prefix_caching: keep the keys and values of texts for requests that begin with the
            same tokens.
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
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server.

    Attributes:
        served_model_name: name of the model in the API; ``None`` for the target's name.
        api_keys: require this API key of clients, for the paths under ``/v1`` and for tokenization.
            Without keys, requests without a key are accepted.
        max_queue: maximum number of waiting requests; further requests are rejected with 429.
        max_body_bytes: maximum size of a request body.
        max_prompt_tokens: maximum number of prompt tokens; ``None`` for the context length.
        max_choices: maximum number of answers of one HTTP request, over all its prompts.
        request_timeout: maximum seconds from the arrival of a request to its last token.
        drain_timeout: seconds for running requests to finish when the server shuts down.
        chat_template: Jinja source of the chat template; ``None`` for the tokenizer's template.
        tool_call_parser: format of the model's tool calls, ``hermes`` or ``llama3_json``; ``None``
            for the one detected from the chat template. It is used with ``tool_choice: auto``.
        allowed_origins: allow cross-origin requests of browsers from this origin, such as
            ``https://example.org``, or ``*`` for all.
        step_timeout: seconds after which an unresponsive engine is restarted.
        per_request_spec_decode_metrics: report the acceptance of drafts in each response, in the
            form of vLLM: ``none``, ``summary``, or ``detailed`` with the counts of every step.

    Raises:
        InvalidParameterError: a value is out of range.
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
    per_request_spec_decode_metrics: str = NONE

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
                raise InvalidParameterError(
                    name, f"must be a positive number of seconds, got {value!r}"
                )
        if not all(self.api_keys):
            raise InvalidParameterError("api_keys", "is empty")
        if self.per_request_spec_decode_metrics not in LEVELS:
            raise InvalidParameterError(
                "per_request_spec_decode_metrics",
                f"must be one of {', '.join(LEVELS)}, got {self.per_request_spec_decode_metrics!r}",
            )
        if self.tool_call_parser not in (None, *PARSERS):
            raise InvalidParameterError(
                "tool_call_parser",
                f"{self.tool_call_parser!r} is unknown; known: {', '.join(PARSERS)}",
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidParameterError(
                    "allowed_origins",
                    f"{origin!r} is not an origin; give SCHEME://HOST[:PORT] without a path, or *",
                )
