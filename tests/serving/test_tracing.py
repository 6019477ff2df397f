"""Spans that a collector would get."""

import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftwise.serving.service import Service
from draftwise.serving.settings import ServerSettings
from draftwise.serving.tracing import NoTracing, OpenTelemetry, set_up_tracing

from .conftest import ZOO
from .running import RunningServer


@pytest.fixture(scope="module")
def traced():
    """A server, and what it tells."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ServerSettings(request_timeout=0.5)
    with RunningServer(Service(ZOO, settings, OpenTelemetry(provider))) as server:
        yield server, exporter
    provider.shutdown()


def test_a_request_is_a_span_that_says_nothing_of_its_text(traced):
    server, exporter = traced
    exporter.clear()
    with server.client() as client:
        body = {"prompt": "a secret", "max_tokens": 8, "n": 2, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
    (span,) = exporter.get_finished_spans()
    told = span.attributes
    assert told["gen_ai.request.model"] == "zoo:target"
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 16
    assert told["gen_ai.request.choice.count"] == 2
    assert told["draftwise.num_steps"] == answer["usage"]["speculation"]["num_steps"]
    assert told["gen_ai.server.time_to_first_token"] > 0
    assert "error.type" not in told
    assert "secret" not in str(dict(told)) + span.name


def test_a_span_says_why_a_request_failed(traced):
    server, exporter = traced
    exporter.clear()
    with server.client() as client:
        body = {"prompt": [10**6], "max_tokens": 8}
        assert client.post("/v1/completions", json=body).status_code == 400
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == "PromptError"


def test_without_an_endpoint_there_are_no_spans():
    assert isinstance(set_up_tracing(None), NoTracing)
    tracing = set_up_tracing("http://127.0.0.1:9/")
    assert isinstance(tracing, OpenTelemetry)


def test_a_collector_that_does_not_answer_does_not_keep_the_server_from_stopping():
    """The provider would wait for it until its own patience is over, here for ever."""
    answer = threading.Event()

    class Provider(TracerProvider):
        def shutdown(self):
            answer.wait()

    OpenTelemetry(Provider(shutdown_on_exit=False)).close()
    answer.set()


def test_spans_are_not_waited_for_when_the_process_ends():
    tracing = set_up_tracing("http://127.0.0.1:9/")
    assert tracing._provider._atexit_handler is None
