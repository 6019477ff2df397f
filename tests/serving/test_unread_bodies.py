"""Bodies that are rejected before validation, and request ids."""

import json
import re

import pytest

from draftwise.serving import openapi

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Once", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


def nested_schema(depth):
    """Nested objects as the JSON schema of an answer."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def still_answers(client):
    assert client.post(COMPLETIONS, json=SHORT).status_code == 200
    assert client.get("/health").json() == {"status": "ok", "reason": None}


@pytest.mark.parametrize("depth", [270, 5000, 500_000])
def test_a_deeply_nested_answer_format_is_rejected(client, depth):
    schema = nested_schema(depth)
    body = '{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"response_format":'
    body += '{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + "}}}"
    if len(body) > 8 << 20:
        body = body[: 8 << 20]
    answer = client.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "body"
    assert "nested too deeply" in error["message"]
    still_answers(client)


@pytest.mark.parametrize(
    ("method", "path", "key"),
    [
        ("PATCH", "/v1/speculation", "policy_options"),
        ("POST", COMPLETIONS, "metadata"),
        ("POST", COMPLETIONS, "logit_bias"),
        ("POST", COMPLETIONS, "prompt"),
        ("POST", "/v1/chat/completions", "messages"),
        ("POST", "/tokenize", "messages"),
        ("POST", "/detokenize", "tokens"),
    ],
)
@pytest.mark.parametrize("braces", ["[]", ('{"a":', "}")])
def test_too_deeply_nested_values_are_rejected(client, method, path, key, braces):
    for depth in (300, 100_000):
        value = braces[0] * depth + ("1" if braces[1] == "}" else "") + braces[1] * depth
        answer = client.request(
            method,
            path,
            content=f'{{"{key}":{value}}}',
            headers=JSON,
        )
        assert answer.status_code == 400
        assert "nested too deeply" in answer.json()["error"]["message"]
    still_answers(client)


def test_the_engine_accepts_the_maximum_nesting(client):
    """The deepest value that the parser accepts can be sent to the engine's process and back."""
    options = '{"threshold":' + nested(195) + "}"
    answer = client.patch(
        "/v1/speculation",
        content='{"policy":"confidence","policy_options":' + options + "}",
        headers=JSON,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] != "body"
    still_answers(client)


def test_invalid_json_is_rejected(client):
    for content, message in (
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"{", "is not JSON"),
        (b'{"prompt": NaN}', "is not JSON"),
        (b'{"prompt": "\xff"}', "is not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "is not JSON"),
    ):
        answer = client.post(COMPLETIONS, content=content, headers=JSON)
        assert answer.status_code == 400
        error = openapi.ErrorBody.model_validate(answer.json()).error
        assert error.param == "body"
        assert message in error.message


def test_only_uncompressed_json_is_accepted(client):
    content = json.dumps(SHORT).encode()
    form = "application/x-www-form-urlencoded"
    for kind in (None, "text/plain", form, "multipart/form-data", "json"):
        headers = {} if kind is None else {"Content-Type": kind}
        answer = client.post(COMPLETIONS, content=content, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["param"] == "content-type"
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
    for encoding in ("gzip", "br", "identity, gzip"):
        headers = JSON | {"Content-Encoding": encoding}
        answer = client.post(COMPLETIONS, content=content, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["param"] == "content-encoding"
    for headers in (
        JSON,
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": "APPLICATION/vnd.api+json"},
        JSON | {"Content-Encoding": "identity"},
    ):
        assert client.post(COMPLETIONS, content=content, headers=headers).status_code == 200


def test_only_valid_request_ids_are_returned(client):
    for number in ("number-7", "a" * 128, "4bf9/2:3=+@_."):
        answer = client.get("/version", headers={"X-Request-Id": number})
        assert answer.headers["x-request-id"] == number
    for number in ("a" * 129, "two words", "{}", "", "a\tb", "\xe9"):
        answer = client.get("/version", headers={"X-Request-Id": number.encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])
