"""Optional tracing of requests with OpenTelemetry."""

from __future__ import annotations

import os
import threading
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.outputs import SpeculationStats

_CLOSE_SECONDS = 0.5


class Span:
    """The span of a request; does nothing if requests are not traced."""

    def __init__(self, span: Any = None) -> None:
        """Wrap a span of OpenTelemetry, if requests are traced."""
        self._span = span

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute of the span."""
        if self._span is not None:
            self._span.set_attribute(key, value)

    def end(self) -> None:
        """End the span."""
        if self._span is not None:
            self._span.end()


class Tracing:
    """A tracer that follows OpenTelemetry's conventions for generative models."""

    def __init__(self, provider: Any = None) -> None:
        """Create a tracer from a tracer provider of the SDK; without one, nothing is traced."""
        self._provider = provider

    def begin(self, model: str, num_prompt_tokens: int, num_answers: int) -> Span:
        """Start the span of a request; it does not contain the prompt."""
        if self._provider is None:
            return Span()
        attributes = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": num_answers,
            "gen_ai.usage.input_tokens": num_prompt_tokens,
        }
        tracer = self._provider.get_tracer("draftwise")
        return Span(tracer.start_span(f"generate {model}", attributes=attributes))

    def close(self) -> None:
        """Send pending spans; they are lost if the collector does not respond."""
        if self._provider is not None:
            thread = threading.Thread(target=self._provider.shutdown, daemon=True)
            thread.start()
            thread.join(_CLOSE_SECONDS)


def record_stats(span: Span, stats: SpeculationStats, first_token_seconds: float | None) -> None:
    """Set attributes for counts and latency of a request."""
    span.set_attribute("gen_ai.usage.output_tokens", stats.num_tokens)
    for name in ("lossless", "num_steps", "num_drafted", "num_verified", "num_accepted"):
        span.set_attribute(f"draftwise.{name}", getattr(stats, name))
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
        return Tracing()
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
    return Tracing(provider)
