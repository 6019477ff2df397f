"""Spans of requests for OpenTelemetry, where its packages are installed and it is told to."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from draftwise.errors import InvalidParameterError
from draftwise.outputs import SpeculationStats

_CLOSE_SECONDS = 0.5


class Span(Protocol):
    """What a request's span needs to be able to do."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Say something of the request."""

    def end(self) -> None:
        """The request has ended."""


class Tracing(Protocol):
    """Where spans come from."""

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """A request was let in."""

    def close(self) -> None:
        """Send what waits, as far as that is possible at once."""


class NoTracing:
    """No spans."""

    def close(self) -> None:
        """Nothing waits."""

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """Nothing is kept."""
        return _NoSpan()


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        """Nothing is kept."""

    def end(self) -> None:
        """Nothing is sent."""


class OpenTelemetry:
    """Spans through OpenTelemetry, with the names of its conventions for generative models."""

    def __init__(self, provider: Any) -> None:
        """Take a tracer provider of its SDK."""
        self._provider = provider
        self._tracer = provider.get_tracer("draftwise")

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """A request was let in; its prompt is not told."""
        span: Span = self._tracer.start_span(
            f"generate {model}",
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": model,
                "gen_ai.request.choice.count": num_answers,
                "gen_ai.usage.input_tokens": num_prompt_tokens,
            },
        )
        return span

    def close(self) -> None:
        """Send what waits; a collector that does not answer loses it."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


def tell(span: Span, stats: SpeculationStats, first_token_seconds: float | None) -> None:
    """Say how a request went."""
    span.set_attribute("gen_ai.usage.output_tokens", stats.num_tokens)
    span.set_attribute("draftwise.lossless", stats.lossless)
    span.set_attribute("draftwise.num_steps", stats.num_steps)
    span.set_attribute("draftwise.num_drafted", stats.num_drafted)
    span.set_attribute("draftwise.num_verified", stats.num_verified)
    span.set_attribute("draftwise.num_accepted", stats.num_accepted)
    if first_token_seconds is not None:
        span.set_attribute("gen_ai.server.time_to_first_token", first_token_seconds)


def set_up_tracing(endpoint: str | None) -> Tracing:
    """Send spans to a collector.

    Args:
        endpoint: where it takes OTLP over HTTP, such as ``http://localhost:4318``; ``None`` for no
            spans. Everything else is told by OpenTelemetry's own environment variables.

    Raises:
        InvalidParameterError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise InvalidParameterError(
            "otlp_endpoint", f"{error.name} is missing: pip install 'draftwise[tracing]'"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "draftwise")
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}),
        shutdown_on_exit=False,  # it would wait for a collector that is gone
    )
    address = f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address)))
    return OpenTelemetry(provider)
