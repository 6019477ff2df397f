"""Validation of request bodies and its error messages."""

import dataclasses
import json

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from draftwise.params import SamplingParams
from draftwise.serving import openapi
from draftwise.serving.http_errors import explain
from draftwise.serving.schemas import ChatBody, CompletionBody, DetokenizeBody, SpeculationChange

CHAT = [{"role": "user", "content": "Hello"}]
CHATTED = {"messages": CHAT}
JSON = {"Content-Type": "application/json"}
# A list of this length must not slow down the detection of an error.
MANY = 500_000


def errors(model, body):
    """All validation errors of a body."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return caught.value.errors()


def complaint(model, body):
    """Message and field that the client receives."""
    found = errors(model, body)
    first = found[0] | {"loc": ("body", *found[0]["loc"])}
    return explain(RequestValidationError([first]).errors()[0])


def assert_complaint(model, body, param, expected):
    message, field = complaint(model, body)
    assert field == param
    assert expected in message
    assert message.startswith(f"{param or 'the body'}: ")


def test_errors_of_completions_name_the_field_and_the_accepted_values():
    for body, param, expected in (
        ({"prompt": True}, "prompt", "a list of token ids"),
        ({"prompt": ["a", 3]}, "prompt[1]", "must be a string, got 3"),
        ({"prompt": [3, "a"]}, "prompt[1]", "must be a token id"),
        ({"prompt": [3, True]}, "prompt[1]", "got true"),
        ({"prompt": [[3], [4, -1]]}, "prompt[1][1]", "got -1"),
        ({"prompt": [[3], "a"]}, "prompt[1]", "a list of token ids"),
        ({"prompt": [None]}, "prompt[0]", "got null"),
        ({"prompt": None}, "prompt", "is required"),
        ({"prompt": [[3]] * 4097}, "prompt", "at most 4096"),
        ({"prompt": ["a"] * 4097}, "prompt", "at most 4096"),
        ({"max_tokens": True}, "max_tokens", "an integer, got true"),
        ({"max_tokens": "5"}, "max_tokens", "an integer, got '5'"),
        ({"max_tokens": 5.0}, "max_tokens", "an integer, got 5.0"),
        ({"temperature": "1"}, "temperature", "a number, got '1'"),
        ({"temperature": True}, "temperature", "a number, got true"),
        ({"stream": 1}, "stream", "true or false, got 1"),
        ({"echo": "yes"}, "echo", "true or false, got 'yes'"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"suffix": "b"}, "suffix", "leave it out"),
        ({"stop": 5}, "stop", "a list of strings, got 5"),
        ({"stop": ["b", 5]}, "stop[1]", "must be a string, got 5"),
        ({"stop": ["b"] * 33}, "stop", "at most 32"),
        ({"stop": ["b" * 257]}, "stop[0]", "at most 256"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        (
            {"logit_bias": {"x": 1}},
            "logit_bias",
            "'x' is not a token",
        ),
        (
            {"logit_bias": {"²": 1}},
            "logit_bias",
            "is not a token id",
        ),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "token 5"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "got 101"),
        ({"speculation": 1}, "speculation", "must be an object"),
        (
            {"speculation": {"policies": 1}},
            "speculation.policies",
            "did you mean 'policy'?",
        ),
        (
            {"structured_outputs": {"choice": ["a", 1]}},
            "structured_outputs.choice[1]",
            "must be a string, got 1",
        ),
    ):
        assert_complaint(CompletionBody, {"prompt": "a"} | body, param, expected)


def test_errors_name_the_field_and_the_accepted_values():
    for model, body, param, expected in (
        (CompletionBody, [], None, "the body: must be an object"),
        (ChatBody, {"messages": "a"}, "messages", "must be a list, got 'a'"),
        (ChatBody, {"messages": [*CHAT, 3]}, "messages[1]", "must be an object, got 3"),
        (ChatBody, {"messages": [{"content": "a"}]}, "messages[0].role", "is required"),
        (ChatBody, {"messages": [{"role": 5}]}, "messages[0].role", "must be a string, got 5"),
        (
            ChatBody,
            {"messages": [*CHAT * 3, {"role": "user", "content": 7}]},
            "messages[3].content",
            "must be a string or a list of text parts, got 7",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "the only supported type; got 'image_url'",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
            "must be a string, got 1",
        ),
        (ChatBody, CHATTED | {"functions": [{}]}, "functions", "use tools"),
        (ChatBody, CHATTED | {"function_call": {"name": "f"}}, "function_call", "tools"),
        (ChatBody, CHATTED | {"temprature": 1}, "temprature", "mean 'temperature'?"),
        (ChatBody, CHATTED | {"zzz": 1}, "zzz", "known keys: "),
        (DetokenizeBody, {"tokens": [1, "2"]}, "tokens[1]", "must be an integer, got '2'"),
        (SpeculationChange, {"lenience": "1"}, "lenience", "must be a number, or an object"),
        (SpeculationChange, {"lenience": {"0": True}}, "lenience", "got true"),
    ):
        assert_complaint(model, body, param, expected)


def test_unknown_keys_are_quoted_and_shortened():
    message, param = complaint(ChatBody, {"messages": CHAT, "top_pp": 1})
    assert "'top_pp'" in message
    assert param == "top_pp"
    message, param = complaint(ChatBody, {"messages": CHAT, "x" * 10**6: 1})
    assert len(message) < 2000
    assert len(param) <= 80


def test_unpaired_surrogates_are_rejected(client):
    """JSON can encode them, but UTF-8 cannot."""
    for path, content in (
        ("/v1/completions", '{"\\ud800": 1}'),
        ("/v1/completions", '{"prompt": "", "speculation": {"\\udfff": 1}}'),
        ("/v1/completions", '{"prompt": "a", "model": "\\ud800"}'),
        ("/v1/chat/completions", '{"messages": [{"role": "a", "\\ud800": 1}]}'),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "a"}], "chat_template_kwargs": {"\\ud800": 1}}',
        ),
    ):
        answer = client.post(path, content=content.encode(), headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "body"
        assert "surrogate" in answer.json()["error"]["message"]


def test_many_errors_in_a_body_are_reported_as_one():
    for model, body in (
        (CompletionBody, {"prompt": 5, "n": "a"} | {f"k{i}": 0 for i in range(MANY)}),
        (CompletionBody, {"prompt": [1, *["a"] * MANY]}),
        (CompletionBody, {"prompt": [[1], *[["a"]] * MANY]}),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(MANY)}}),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}),
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatBody, {"messages": CHAT, "modalities": [1] * MANY}),
        (DetokenizeBody, {"tokens": ["a"] * MANY}),
    ):
        assert len(errors(model, body)) == 1


def test_responses_to_such_bodies(client):
    for body, param in (
        ({f"k{i}": 0 for i in range(MANY)}, "k0"),
        ({"tokens": ["a"] * MANY}, "tokens[0]"),
    ):
        refused = client.post("/detokenize", json=body)
        assert refused.status_code == 400
        assert openapi.ErrorBody.model_validate(refused.json()).error.param == param


def test_bodies_have_all_sampling_parameters():
    """The exception is `prompt_logprobs`, which `echo` with `logprobs` replaces."""
    words = {field.name for field in dataclasses.fields(SamplingParams)} - {"prompt_logprobs"}
    for model in (CompletionBody, ChatBody):
        assert words <= model.model_fields.keys()


def test_zero_and_minus_one_disable_top_k():
    for top_k in (0, -1):
        body = CompletionBody.model_validate({"prompt": "a", "top_k": top_k})
        assert body.sampling(4, 0) == SamplingParams(max_tokens=4)


def test_changes_contain_only_given_keys():
    given = {"lenience": {"0": 1, "8": 0.5}, "policy": None, "num_speculative_tokens": 3}
    changes = SpeculationChange.model_validate(given).changes()
    assert changes == {"lenience": {"0": 1, "8": 0.5}, "num_speculative_tokens": 3}


IGNORED = {
    "service_tier": "flex",
    "safety_identifier": "abc",
    "prompt_cache_key": "abc",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "user": "somebody",
    "metadata": {"a": "b"},
}
IGNORED_IN_CHATS = {"prediction": {"type": "content", "content": "Hello"}}


def test_keys_without_effect_are_ignored(client):
    plain = {"max_tokens": 4, "temperature": 0}
    for path, about, ignored in (
        ("/v1/completions", {"prompt": "Hello"}, IGNORED),
        ("/v1/chat/completions", {"messages": CHAT}, IGNORED | IGNORED_IN_CHATS),
    ):
        expected = client.post(path, json=about | plain).json()["choices"]
        answer = client.post(path, json=about | plain | ignored)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == expected


def test_the_schema_marks_ignored_keys(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for name, ignored in (
        ("CompletionBody", IGNORED),
        ("ChatBody", {**IGNORED, **IGNORED_IN_CHATS}),
    ):
        body = schemas[name]
        assert body["additionalProperties"] is False
        for key in ignored:
            assert "ignored" in body["properties"][key]["description"]


def test_numbers_too_large_for_a_float_are_rejected(client):
    for body in (
        '{"prompt": "a", "temperature": 1%s}',
        '{"prompt": "a", "logit_bias": {"1": 1%s}}',
    ):
        content = (body % ("0" * 4000)).encode()
        refused = client.post("/v1/completions", content=content, headers=JSON)
        assert refused.status_code == 400
        assert json.loads(refused.content)["error"]["param"] in ("temperature", "logit_bias")
