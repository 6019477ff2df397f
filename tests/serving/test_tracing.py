"""Spans of requests."""

import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftwise.serving.service import Service
from draftwise.serving.settings import ServerSettings
from draftwise.serving.tracing import Tracing, set_up_tracing

from .conftest import ZOO
from .running import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traced():
    """A server and its exported spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ServerSettings(request_timeout=0.5)
    with RunningServer(Service(ZOO, settings, Tracing(provider))) as server:
        yield server, exporter
    provider.shutdown()


def test_a_request_has_a_span_without_its_text(traced):
    server, exporter = traced
    exporter.clear()
    with server.client() as client:
        body = {"prompt": "a secret", "max_tokens": 8, "n": 2, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
    (span,) = exporter.get_finished_spans()
    attributes = span.attributes
    assert attributes["gen_ai.request.model"] == "zoo:target"
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 16
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["draftwise.num_steps"] == answer["usage"]["speculation"]["num_steps"]
    assert attributes["gen_ai.server.time_to_first_token"] > 0
    assert "error.type" not in attributes
    assert "secret" not in str(dict(attributes)) + span.name


def test_a_span_of_a_failed_request_has_its_error(traced):
    server, exporter = traced
    exporter.clear()
    with server.client() as client:
        body = {"prompt": [10**6], "max_tokens": 8}
        assert client.post("/v1/completions", json=body).status_code == 400
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == "PromptError"


def test_without_an_endpoint_there_are_no_spans():
    assert set_up_tracing(None)._provider is None
    assert isinstance(set_up_tracing("http://127.0.0.1:9/")._provider, TracerProvider)


def test_an_unresponsive_collector_does_not_delay_the_shutdown():
    """The provider waits for its own timeout, which here never passes."""
    answer = threading.Event()

    class Provider(TracerProvider):
        def shutdown(self):
            answer.wait()

    Tracing(Provider(shutdown_on_exit=False)).close()
    answer.set()
