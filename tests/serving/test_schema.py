"""Responses match the OpenAPI schema for generated requests."""

import json
from dataclasses import replace

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from draftwise.serving.app import create_app
from draftwise.serving.service import Service
from draftwise.serving.settings import ServerSettings

from .conftest import ZOO
from .running import running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


# Generated requests must be small.
SMALL = replace(ZOO, max_model_len=32)
SETTINGS = ServerSettings(max_choices=4)


@pytest.fixture(scope="module")
def server():
    """Limit generated requests to a few tokens."""
    with running(SMALL, SETTINGS) as server:
        yield server


schema = schemathesis.openapi.from_dict(create_app(Service(SMALL)).openapi())


@schema.parametrize()
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
def test_responses_match_the_schema(case, server):
    if case.path == "/v1/speculation" and isinstance(case.body, dict):
        # Other tests share the server, so the request must be refused and must not change anything.
        case.body["policy"] = "none such"
    case.call_and_validate(base_url=server.url, checks=CHECKS)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
known = st.sampled_from(
    [
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "stop",
        "n",
        "logit_bias",
        "seed",
        "stream",
        "speculation",
        "top_p",
        "stream_options",
        "stop_token_ids",
        "response_format",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "logprobs",
        "echo",
        "min_tokens",
    ]
)


@hypothesis.settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(known, junk, max_size=5) | junk,
    cut=st.integers(0, 40),
)
def test_malformed_bodies_never_stop_the_server(client, path, body, cut):
    content = json.dumps(body).encode()
    content = content[: len(content) - cut] if cut < 10 else content
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500
    assert client.get("/health").status_code == 200
