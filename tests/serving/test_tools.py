"""Tools in chats: prompts, constrained answers and errors."""

import json

import jsonschema_rs
import pytest

from draftwise.errors import InvalidParameterError
from draftwise.serving import openapi
from draftwise.serving.settings import ServerSettings

from .conftest import ZOO
from .running import running
from .test_completions import CHAT, ask, events

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [ADD, TIME]
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
}
TALKS = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]


@pytest.fixture
def client(tooled):
    with tooled.client() as client:
        yield client


def forced(text):
    """Force the model to generate a given text."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200, "temperature": 0}


def whole(client, **body):
    """Message and finish reason of an answer, which must match the schema."""
    response = ask(client, PATH, **body)
    assert response.status_code == 200, response.text
    choice = openapi.ChatCompletion.model_validate(response.json()).choices[0]
    return choice.message, choice.finish_reason


def streamed(client, **body):
    """Content, calls as (name, arguments), and finish reason."""
    content, calls, reason = "", {}, None
    with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        for each in events(response):
            (choice,) = each["choices"]
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] not in calls:
                    assert call["id"]
                    calls[call["index"]] = [call["function"]["name"], ""]
                calls[call["index"]][1] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    assert list(calls) == list(range(len(calls)))
    return content, [tuple(each) for each in calls.values()], reason


def written(client, **body):
    """The prompt of a chat, whose length must equal the reported number of prompt tokens."""
    tokens = ask(client, "/tokenize", **body).json()["tokens"]
    usage = ask(client, PATH, **body, max_tokens=0).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    return ask(client, "/detokenize", tokens=tokens).json()["prompt"]


def test_the_template_gets_tools_calls_and_results(client):
    def with_tools(tools, tail):
        listed = "".join(f"Tool {t['function']['name']}: {json.dumps(t)}\n" for t in tools)
        return listed + f"user: {CHAT[0]['content']}\n" + tail

    asked = with_tools(TOOLS, "assistant:")
    assert written(client, messages=CHAT, tools=TOOLS) == asked
    called = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    rest = f"assistant: {called}\nResult of call_1: 5\nassistant:"
    assert written(client, messages=TALKS, tools=[ADD]) == with_tools([ADD], rest)
    without = with_tools([], "assistant:")
    for none in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": None}):
        assert written(client, messages=CHAT, **none) == without


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "Let me see.\n<tool_call>\n"
            '{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
            "Let me see.",
            [("add", {"a": 2, "b": 3})],
        ),
        (
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',
            None,
            [("get_time", {}), ("add", {"a": 1, "b": 1})],
        ),
        (
            "No <tool_call> yet.\n<tool_call>"
            '{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}</tool_call>',
            "No <tool_call> yet.",
            [("add", {"a": 2, "b": 3})],
        ),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        ("There are 5 apples.", "There are 5 apples.", []),
    ],
)
def test_calls_of_the_model_are_parsed(client, text, content, calls):
    body = {"messages": CHAT, "tools": TOOLS, **forced(text)}
    message, reason = whole(client, **body)
    assert message.content == content
    made = message.tool_calls or []
    assert [(c.function.name, json.loads(c.function.arguments)) for c in made] == calls
    assert reason == ("tool_calls" if calls else "stop")
    expected = [(c.function.name, c.function.arguments) for c in made]
    assert streamed(client, **body) == (content or "", expected, reason)
    one, _ = whole(client, **body, parallel_tool_calls=False)
    assert len(one.tool_calls or []) == min(1, len(calls))


def test_without_tools_tags_are_text(client):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for none in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message, reason = whole(client, messages=CHAT, **none, **forced(text))
        assert (message.content, message.tool_calls, reason) == (text, None, "stop")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_match_their_schema(server, tooled, choice, temperature):
    """Also with a template that does not support tools."""
    for each in (server, tooled):
        with each.client() as client:
            body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
            body |= {"temperature": temperature, "seed": 3, "parallel_tool_calls": False}
            message, reason = whole(client, **body)
            (call,) = message.tool_calls
            arguments = json.loads(call.function.arguments)
            schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}
            jsonschema_rs.validate(schemas[call.function.name], arguments)
            assert message.content is None
            assert reason == "tool_calls"
            if choice is NAMED:
                assert call.function.name == "add"
            if temperature == 0:
                expected = [(call.function.name, call.function.arguments)]
                assert streamed(client, **body) == ("", expected, "tool_calls")


def test_several_answers_have_separate_calls(client):
    body = {"messages": CHAT, "tools": [ADD], "tool_choice": "required", "max_tokens": 80}
    answer = ask(client, PATH, **body, n=3, seed=1, parallel_tool_calls=False).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 3


def test_a_truncated_call_ends_with_length(client):
    body = {"messages": CHAT, "tools": [ADD], "max_tokens": 10, "temperature": 0}
    message, reason = whole(client, **body, tool_choice="required")
    assert (message.tool_calls, reason) == (None, "length")
    assert '[{"name": "add", "parameters": {'.startswith("[" + message.content)
    message, reason = whole(client, **body, tool_choice=NAMED)
    assert reason == "length"
    with pytest.raises(ValueError, match=r"line 1"):
        json.loads(message.tool_calls[0].function.arguments)


def test_a_parser_can_be_chosen(server):
    text = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
    body = {"messages": CHAT, "tools": TOOLS, **forced(text)}
    with server.client() as client:  # the zoo's own template: no parser
        message, _ = whole(client, **body)
        assert (message.content, message.tool_calls) == (text, None)
    settings = ServerSettings(tool_call_parser="llama3_json")
    with running(ZOO, settings) as other, other.client() as client:
        message, reason = whole(client, **body)
        assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"a": 2, "b": 3}]
        assert (message.content, reason) == (None, "tool_calls")
    with pytest.raises(InvalidParameterError, match="hermes, llama3_json"):
        ServerSettings(tool_call_parser="xml")


def calling(arguments):
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    return [*CHAT, {"role": "assistant", "tool_calls": [call]}]


def test_errors_of_tools_name_the_field(client):
    for body, param, expected in (
        ({"tools": "add"}, "tools", "must be a list"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [{**TIME, "function": {"name": "a b"}}]}, "tools[0].function.name", "match"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name", "defined twice"),
        ({"tools": [TIME] * 129}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required' or"),
        ({"tools": TOOLS, "tool_choice": {"name": "add"}}, "tool_choice", "'required' or"),
        (
            {"tools": [TIME], "tool_choice": NAMED},
            "tool_choice",
            "'add' is not among the tools",
        ),
        ({"tool_choice": "required"}, "tools", "is empty"),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
            "cannot be combined",
        ),
        ({"messages": calling("[1]")}, "messages[1].tool_calls[0].function.arguments", "object"),
        ({"messages": calling("{")}, "messages[1].tool_calls[0].function.arguments", "JSON"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [5]}]},
            "messages[0].tool_calls[0]",
            "must be an object, got 5",
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": 5}]},
            "messages[0].tool_call_id",
            "must be a string, got 5",
        ),
    ):
        refused = ask(client, PATH, **{"messages": CHAT, **body})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == param
        assert expected in error["message"]


def test_an_unsupported_schema_is_rejected(client):
    wrong = {"name": "add", "parameters": {"properties": {"a": {"type": "no such"}}}}
    tools = [{"type": "function", "function": wrong}]
    refused = ask(client, PATH, messages=CHAT, tools=tools, tool_choice="required")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    assert ask(client, PATH, messages=CHAT, tools=tools, max_tokens=1).status_code == 200


def test_too_deeply_nested_arguments_of_earlier_calls_are_rejected(client):
    """They are JSON within a string, which the parser of bodies does not parse."""
    for depth in (300, 930, 945, 100_000):
        arguments = '{"a":' + "[" * depth + "]" * depth + "}"
        refused = ask(client, PATH, messages=calling(arguments))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
