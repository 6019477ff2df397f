"""Bodies that are rejected before validation, and request ids."""

import json
import re

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Once", "max_tokens": 2}


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


def nested_schema(depth):
    """Nested objects as the JSON schema of an answer."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def still_answers(client):
    assert client.post(COMPLETIONS, json=SHORT).status_code == 200
    assert client.get("/health").json() == {"status": "ok", "reason": None}


def test_a_deeply_nested_answer_format_is_rejected(client):
    for depth in [270, 5000, 500_000]:
        schema = nested_schema(depth)
        body = '{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"response_format":'
        body += '{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + "}}}"
        if len(body) > 8 << 20:
            body = body[: 8 << 20]
        answer = client.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, depth
        error = answer.json()["error"]
        assert error["param"] == "body", depth
        assert "nested too deeply" in error["message"], depth
        still_answers(client)


def test_too_deeply_nested_values_are_rejected(client):
    for method, path, key in [
        ("PATCH", "/v1/speculation", "policy_options"),
        ("POST", COMPLETIONS, "metadata"),
        ("POST", COMPLETIONS, "logit_bias"),
        ("POST", COMPLETIONS, "prompt"),
        ("POST", "/v1/chat/completions", "messages"),
        ("POST", "/tokenize", "messages"),
        ("POST", "/detokenize", "tokens"),
    ]:
        for braces in ["[]", ('{"a":', "}")]:
            for depth in (300, 100_000):
                value = braces[0] * depth + ("1" if braces[1] == "}" else "") + braces[1] * depth
                answer = client.request(
                    method,
                    path,
                    content=f'{{"{key}":{value}}}',
                    headers={"Content-Type": "application/json"},
                )
                assert answer.status_code == 400, (path, key, depth)
                assert "nested too deeply" in answer.json()["error"]["message"], (path, key)
            still_answers(client)


def test_the_engine_accepts_the_maximum_nesting(client):
    """The deepest value that the parser accepts can be sent to the engine's process and back."""
    options = '{"threshold":' + nested(195) + "}"
    answer = client.patch(
        "/v1/speculation",
        content='{"policy":"confidence","policy_options":' + options + "}",
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] != "body"
    still_answers(client)


def test_invalid_json_is_rejected(client):
    for content, message in [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"{", "is not JSON"),
        (b'{"prompt": NaN}', "is not JSON"),
        (b'{"prompt": "\xff"}', "is not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "is not JSON"),
    ]:
        answer = client.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, content
        assert answer.json()["error"]["param"] == "body", content
        assert message in answer.json()["error"]["message"], content


def test_other_content_types_are_rejected(client):
    for kind in [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "json",
    ]:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = client.post(COMPLETIONS, content=json.dumps(SHORT).encode(), headers=headers)
        assert answer.status_code == 415, kind
        assert answer.json()["error"]["param"] == "content-type", kind
        assert "Content-Type: application/json" in answer.json()["error"]["message"], kind


def test_content_types_of_json_are_accepted(client):
    for kind in ["application/json", "application/json; charset=utf-8", "APPLICATION/vnd.api+json"]:
        answer = client.post(
            COMPLETIONS, content=json.dumps(SHORT).encode(), headers={"Content-Type": kind}
        )
        assert answer.status_code == 200, kind


def test_compressed_bodies_are_rejected(client):
    for encoding in ["gzip", "br", "identity, gzip"]:
        answer = client.post(COMPLETIONS, json=SHORT, headers={"Content-Encoding": encoding})
        assert answer.status_code == 415, encoding
        assert answer.json()["error"]["param"] == "content-encoding"
        plain = client.post(COMPLETIONS, json=SHORT, headers={"Content-Encoding": "identity"})
        assert plain.status_code == 200, encoding


def test_valid_request_ids_are_returned(client):
    for number in ["number-7", "a" * 128, "4bf9/2:3=+@_."]:
        answer = client.get("/version", headers={"X-Request-Id": number})
        assert answer.headers["x-request-id"] == number


def test_invalid_request_ids_are_replaced(client):
    for number in ["a" * 129, "two words", "{}", "", "a\tb", "\xe9"]:
        answer = client.get("/version", headers={"X-Request-Id": number.encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"]), number
