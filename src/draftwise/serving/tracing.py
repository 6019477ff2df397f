"""Optional tracing of requests with OpenTelemetry."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from draftwise.errors import InvalidParameterError
from draftwise.outputs import SpeculationStats

_CLOSE_SECONDS = 0.5


class Span(Protocol):
    """Interface of the span of a request."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute of the span."""

    def end(self) -> None:
        """End the span."""


class Tracing(Protocol):
    """Interface of tracers."""

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """Start the span of a request."""

    def close(self) -> None:
        """Send pending spans, as far as that is possible without waiting."""


class NoTracing:
    """A tracer that does nothing."""

    def close(self) -> None:
        """Do nothing."""

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """Return a span that does nothing."""
        return _NoSpan()


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class OpenTelemetry:
    """A tracer for OpenTelemetry that follows its conventions for generative models."""

    def __init__(self, provider: Any) -> None:
        """Create a tracer from a tracer provider of the SDK."""
        self._provider = provider
        self._tracer = provider.get_tracer("draftwise")

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """Start the span of a request; it does not contain the prompt."""
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
        """Send pending spans; they are lost if the collector does not respond."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


def record_stats(span: Span, stats: SpeculationStats, first_token_seconds: float | None) -> None:
    """Set attributes for counts and latency of a request."""
    span.set_attribute("gen_ai.usage.output_tokens", stats.num_tokens)
    span.set_attribute("draftwise.lossless", stats.lossless)
    span.set_attribute("draftwise.num_steps", stats.num_steps)
    span.set_attribute("draftwise.num_drafted", stats.num_drafted)
    span.set_attribute("draftwise.num_verified", stats.num_verified)
    span.set_attribute("draftwise.num_accepted", stats.num_accepted)
    if first_token_seconds is not None:
        span.set_attribute("gen_ai.server.time_to_first_token", first_token_seconds)


def set_up_tracing(endpoint: str | None) -> Tracing:
    """Create the tracer of a server.

    Args:
        endpoint: OTLP endpoint over HTTP, such as ``http://localhost:4318``; ``None`` disables
            tracing. Other settings are read from OpenTelemetry's environment variables.

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
        shutdown_on_exit=False,  # it would wait for an unreachable collector
    )
    address = f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address)))
    return OpenTelemetry(provider)
