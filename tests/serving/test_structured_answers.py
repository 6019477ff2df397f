"""Log-probabilities and structured outputs through the server."""

import json
import math
from dataclasses import replace

import jsonschema_rs
import pytest
from transformers import AutoTokenizer

from draftwise.checkpoints.source import locate
from draftwise.outputs import TokenLogprobs, TokenSource
from draftwise.params import SamplingParams
from draftwise.serving.answers import CompletionFormat, Echo
from draftwise.serving.messages import Piece
from draftwise.serving.tokenizing import TokenTexts
from draftwise.structured_outputs import StructuredOutputs

from .test_completions import CHAT, PROMPT, ask, events

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
LARGE = {"enum": [str(number) for number in range(60_000)]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


def test_logprobs_are_those_of_the_target(client, offline):
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=3)
    expected = offline.generate(PROMPT, params)[0]
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 3}
    logprobs = ask(client, **body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(
        [e.logprob for e in expected.logprobs], abs=1e-4
    )
    assert "".join(logprobs["tokens"]) == expected.text
    assert logprobs["text_offset"][-1] == len(expected.text) - len(logprobs["tokens"][-1])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == pytest.approx(logprob)
        assert 3 <= len(top) <= 4
        assert sum(math.exp(each) for each in top.values()) < 1.0001


def test_streamed_logprobs_equal_those_of_the_answer(client):
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 1}
    whole = ask(client, **body).json()["choices"][0]["logprobs"]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        parts = [each["choices"][0]["logprobs"] for each in events(response)]
    for name, values in whole.items():
        joined = [value for part in parts if part for value in part[name]]
        if name in ("tokens", "text_offset"):
            assert joined == values
        elif name == "token_logprobs":
            assert joined == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_match_a_schema(client, temperature):
    body = {"messages": CHAT, "max_tokens": 60, "temperature": temperature, "seed": 3, "n": 4}
    answer = ask(client, "/v1/chat/completions", **body, response_format=FORMAT).json()
    for choice in answer["choices"]:
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            jsonschema_rs.validate(SCHEMA, value)
    assert any(choice["finish_reason"] == "stop" for choice in answer["choices"])
    assert answer["usage"]["speculation"]["lossless"]


def test_a_streamed_answer_equals_the_complete_one(client):
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    body["structured_outputs"] = {"choice": ["seven apples", "eight apples", "no apple"]}
    whole = ask(client, **body).json()["choices"][0]
    assert whole["text"] in body["structured_outputs"]["choice"]
    assert whole["finish_reason"] == "stop"
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert "".join(e["choices"][0]["text"] for e in events(response)) == whole["text"]


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/v1/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("/v1/completions", {"structured_outputs": {}}, "structured_outputs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (
            "/v1/chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "no such"}},
                }
            },
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            "/v1/completions",
            {"structured_outputs": {"json": LARGE}},
            "structured_outputs.json_schema",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": LARGE}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_errors_name_the_field_of_the_grammar(client, path, wrong, param):
    about = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    refused = ask(client, path, **about, **wrong)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_a_grammar_is_prepared_once_for_all_answers(server, client, monkeypatch):
    made = []
    build = StructuredOutputs.__post_init__

    def counted(self):
        made.append(self)
        build(self)

    monkeypatch.setattr(StructuredOutputs, "__post_init__", counted)
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]+"}, "max_tokens": 2}
    answer = ask(client, "/v1/completions", **body, n=5).json()
    assert len(answer["choices"]) == 5
    assert len(made) == 1


def test_prompt_logprobs_of_many_answers_are_limited(client):
    body = {"prompt": [5] * 500, "echo": True, "logprobs": 20, "max_tokens": 0}
    refused = ask(client, "/v1/completions", **body, n=128)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logprobs"
    assert ask(client, "/v1/completions", **body, n=2).status_code == 200


def test_bytes_of_tokens_concatenate_to_the_text():
    tokenizer = AutoTokenizer.from_pretrained(locate("zoo:target", "target"))
    texts = TokenTexts(tokenizer)
    text = "naïve “quotes” 日本 😀 plain"
    joined = bytes(byte for token in tokenizer.encode(text) for byte in texts(token)[1])
    assert joined.decode() == text
    assert TokenTexts(None)(7) == ("token_id:7", [])


@pytest.mark.parametrize("prompt", ["text", "tokens"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_an_echo_has_logprobs_of_the_prompt(client, offline, prompt, stream, max_tokens):
    """Log-likelihood tasks of evaluation harnesses need this."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2, prompt_logprobs=2)
    expected = offline.generate(PROMPT, params)[0]
    given = PROMPT if prompt == "text" else expected.prompt_token_ids
    body = {"prompt": given, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
    body |= {"echo": True, "stream": stream}
    if stream:
        with client.stream("POST", "/v1/completions", json=body) as response:
            parts = [each["choices"][0] for each in events(response)]
        names = parts[0]["logprobs"].keys()
        logprobs = {name: [v for part in parts for v in part["logprobs"][name]] for name in names}
        text, reason = "".join(part["text"] for part in parts), parts[-1]["finish_reason"]
    else:
        choice = ask(client, **body).json()["choices"][0]
        logprobs, text, reason = choice["logprobs"], choice["text"], choice["finish_reason"]
    assert text == PROMPT + expected.text
    assert reason == "length"
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    every = [*expected.prompt_logprobs[1:], *expected.logprobs]
    assert logprobs["token_logprobs"][1:] == pytest.approx([e.logprob for e in every], abs=1e-4)
    assert "".join(logprobs["tokens"]) == text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    for token, logprob, top in zip(
        logprobs["tokens"][1:],
        logprobs["token_logprobs"][1:],
        logprobs["top_logprobs"][1:],
        strict=True,
    ):
        assert top[token] == logprob
        assert len(top) in (2, 3)


def test_several_prompts_are_scored_at_once(client):
    """The results are in order and equal those of single requests."""
    prompts = [PROMPT, "def f(x):", "one two three"]
    body = {"max_tokens": 0, "logprobs": 1, "echo": True}
    together = ask(client, prompt=prompts, **body).json()["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        (alone,) = ask(client, prompt=prompt, **body).json()["choices"]
        assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            alone["logprobs"]["token_logprobs"][1:], abs=1e-4
        )
        assert choice["text"] == prompt


@pytest.mark.parametrize(
    ("path", "about"), [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {})]
)
def test_max_tokens_zero_generates_nothing(client, path, about):
    about = about or {"messages": CHAT}
    answer = ask(client, path, **about, max_tokens=0).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice.get("text", "") == choice.get("message", {}).get("content", "") == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] > 0


def test_added_special_tokens_do_not_shift_offsets_of_an_echo():
    """Some tokenizers add a special token at the beginning."""

    def texts(token):
        return ["<s>", "one", " two", "!"][token], []

    echo = Echo("one two", [0, 1, 2], has_logprobs=True)
    completion_format = CompletionFormat("name", False, texts, [echo])
    logprobs = [TokenLogprobs(-float(i), 1, ()) for i in range(4)]
    piece = Piece(0, [3], [("!", TokenSource.TARGET)], logprobs[3:], None)
    piece = replace(piece, prompt_logprobs=[None, *logprobs[1:3]])
    choice = completion_format.chunk(0, piece)["choices"][0]
    assert choice["text"] == "one two!"
    assert choice["logprobs"]["tokens"] == ["<s>", "one", " two", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 7]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
