"""Every key of the installed OpenAI client: known, and accepted if it asks for nothing."""

import copy
import inspect
import types
import typing
from collections.abc import Iterable, Sequence

import openai
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from pydantic import ValidationError
from typing_extensions import is_typeddict

from draftwise.serving import openapi
from draftwise.serving.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SpeculationChange,
    TokenizeBody,
)

from .test_bodies import CHAT, IGNORED, IGNORED_IN_CHATS, assert_complaint, complaint
from .test_completions import events

CHATS = (ChatCompletions.create, ChatBody, {"messages": CHAT})
TEXTS = (Completions.create, CompletionBody, {"prompt": "Hello"})
# Parameters that the client does not send as keys.
NOT_SENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
REQUIRED = {"messages", "model", "prompt"}
# Values of each key that ask for nothing, or for what happens without the key.
NEUTRAL = {
    "audio": [{}],
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0, 0.0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "max_completion_tokens": [],
    "max_tokens": [],
    "metadata": [{}, {"topic": "sums"}],
    "modalities": [[], ["text"]],
    "moderation": [{}],
    "n": [1],
    "parallel_tool_calls": [True, False],
    "prediction": [{"type": "content", "content": "Hello"}],
    "presence_penalty": [0, 0.0],
    "prompt_cache_key": ["", "sums"],
    "prompt_cache_options": [{}, {"mode": "implicit", "ttl": "30m"}, {"mode": "explicit"}],
    "prompt_cache_retention": ["in_memory", "24h"],
    "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "response_format": [{"type": "text"}],
    "safety_identifier": ["", "me"],
    "seed": [],
    "service_tier": ["auto", "default", "flex", "scale", "priority", "fast"],
    "stop": ["", [], [""]],
    "store": [False],
    "stream": [False],
    "stream_options": [{}, {"include_usage": False, "include_obfuscation": False}],
    "suffix": [""],
    "temperature": [1, 1.0],
    "tool_choice": ["auto", "none"],
    "tools": [[]],
    "top_logprobs": [0],
    "top_p": [1, 1.0],
    "user": ["", "me"],
    "verbosity": ["medium"],
    "web_search_options": [],
}
# An empty object asks OpenAI for a web search.
EMPTY_BUT_REFUSED = {"web_search_options"}
REFUSED = [
    ("audio", {"voice": "alloy", "format": "mp3"}, "audio output is not supported"),
    ("modalities", ["audio"], "only text is generated"),
    ("modalities", ["text", "audio"], "only text is generated"),
    ("moderation", {"model": "omni-moderation-latest"}, "moderation is not supported"),
    ("store", True, "answers are not stored"),
    ("store", 0, "set it to false"),
    ("stream_options.include_obfuscation", True, "streams are not padded"),
    ("verbosity", "low", "the length of answers is not controlled"),
    ("web_search_options", {}, "web search is not supported"),
    ("web_search_options", {"search_context_size": "low"}, "web search is not supported"),
    ("functions", [{"name": "add"}], "use tools"),
    ("function_call", {"name": "add"}, "use tools"),
    ("reasoning_effort", "most", "must be 'none', 'minimal'"),
]


def keys_of(method):
    """The optional keys of a method of the client, with their types."""
    hints = typing.get_type_hints(method)
    names = inspect.signature(method).parameters.keys() - NOT_SENT - REQUIRED
    return {name: hints[name] for name in sorted(names)}


def alternatives(hint):
    """The types of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for arg in typing.get_args(hint) for each in alternatives(arg)]
    return [hint]


def kind_of(hint):
    return typing.get_origin(hint) or hint


def has_required_keys(typed_dict):
    hints = typing.get_type_hints(typed_dict, include_extras=True)
    return any(typing.get_origin(each) is typing.Required for each in hints.values())


def empty_values(hint):
    """The empty values that a type allows."""
    for each in alternatives(hint):
        if each is str:
            yield ""
        elif kind_of(each) in (list, Iterable, Sequence):
            yield []
        elif kind_of(each) is dict or (is_typeddict(each) and not has_required_keys(each)):
            yield {}


def asked(body):
    """What a body asks for: parameters of the engine and of the prompt."""
    chat = None
    if isinstance(body, ChatBody):
        variables = {k: v for k, v in body.template_variables().items() if k != "reasoning_effort"}
        chat = (body.messages, body.tools, body.max_completion_tokens, variables)
    return body.sampling(4, 0), body.grammar(), body.stream, body.max_tokens, chat


@pytest.mark.parametrize(("method", "model", "required"), [CHATS, TEXTS])
def test_a_key_that_asks_for_nothing_is_accepted(method, model, required):
    known = {field.alias or name for name, field in model.model_fields.items()}
    plain = model.model_validate(required)
    for key, hint in keys_of(method).items():
        assert key in known, f"{key} is new in OpenAI's client: decide what {model.__name__} does"
        assert key in NEUTRAL, f"list the neutral values of {key}"
        assert model.model_validate({**required, key: None}) == plain
        neutral = [] if model is CompletionBody and key == "logprobs" else NEUTRAL[key]
        empty = [] if key in EMPTY_BUT_REFUSED else list(empty_values(hint))
        for value in (*neutral, *empty):
            assert asked(model.model_validate({**required, key: value})) == asked(plain), key


def test_the_types_of_the_client_have_empty_values():
    """So that the test above does not send nothing."""
    found = {key: list(empty_values(hint)) for key, hint in keys_of(CHATS[0]).items()}
    assert found["stop"] == ["", []]
    assert found["tools"] == found["functions"] == found["modalities"] == [[]]
    assert found["logit_bias"] == found["prompt_cache_options"] == [{}]
    assert found["user"] == [""]
    assert found["response_format"] == []
    assert {key for key in EMPTY_BUT_REFUSED if found[key]} == EMPTY_BUT_REFUSED


def test_a_key_that_cannot_be_fulfilled_is_refused():
    for key, value, expected in REFUSED:
        outer, _, inner = key.partition(".")
        body = {"messages": CHAT, outer: {inner: value} if inner else value}
        assert_complaint(ChatBody, body, key, expected)


def test_messages_with_audio_or_deprecated_calls_are_refused():
    for key in ("audio", "function_call"):
        messages = [*CHAT, {"role": "assistant", key: {"id": "1"}}]
        body = {"messages": messages}
        assert_complaint(ChatBody, body, f"messages[1].{key}", "not supported")


def test_refusals_are_text():
    parts = [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "I may not."}]
    messages = [
        {"role": "assistant", "content": None, "refusal": "I may not."},
        {"role": "assistant", "content": parts},
    ]
    body = ChatBody.model_validate({"messages": messages})
    texts = [{"type": "text", "text": "No: "}, {"type": "text", "text": "I may not."}]
    assert [each.plain()["content"] for each in body.messages] == ["I may not.", texts]


def test_the_reasoning_effort_is_a_variable_of_the_template():
    body = {"messages": CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"a": None}}
    variables = ChatBody.model_validate(body).template_variables()
    assert variables == {"reasoning_effort": "low", "a": None}
    body["chat_template_kwargs"] = {"reasoning_effort": "high"}
    assert ChatBody.model_validate(body).template_variables() == {"reasoning_effort": "high"}


def examples(hint):
    """A value of each alternative of a type, in which every object has all of its keys."""
    for each in alternatives(hint):
        kind = kind_of(each)
        if is_typeddict(each):
            yield {key: next(examples(of)) for key, of in typing.get_type_hints(each).items()}
        elif kind is typing.Literal:
            yield typing.get_args(each)[0]
        elif kind in (typing.Required, typing.NotRequired, typing.Annotated):
            yield from examples(typing.get_args(each)[0])
        elif kind in (list, Iterable, Sequence):
            yield from ([item] for item in examples(typing.get_args(each)[0]))
        elif kind in (str, bool, int, float, dict):
            yield {str: "a", bool: True, int: 1, float: 0.5, dict: {}}[kind]


def places(value, path=()):
    """The paths of all keys of all objects in a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if isinstance(value, dict):
            yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def result(model, body):
    """The validated keys without those that are ignored, or the message and field of the error."""
    try:
        return model.model_validate(body).model_dump(exclude={*IGNORED, *IGNORED_IN_CHATS})
    except ValidationError:
        return complaint(model, body)


@pytest.mark.parametrize(("method", "model", "required"), [CHATS, TEXTS])
def test_null_counts_as_absent_in_every_object(method, model, required):
    """Whatever the result is without a key, it is the same with null."""
    hints = keys_of(method) | {"messages": typing.get_type_hints(method).get("messages", str)}
    num_objects = 0
    for key, hint in hints.items():
        for example in examples(hint):
            if not isinstance(example, dict | list):
                continue
            num_objects += 1
            body = {**required, key: example}
            for *outer, last in places({key: example}):
                without, null = copy.deepcopy(body), copy.deepcopy(body)
                for each, change in (
                    (without, dict.pop),
                    (null, lambda at, k: at.update({k: None})),
                ):
                    at = each
                    for step in outer:
                        at = at[step]
                    change(at, last)
                assert result(model, null) == result(model, without), (outer, last)
    assert num_objects > (20 if model is ChatBody else 2)


def test_null_asks_for_nothing_whatever_the_key():
    """Also where OpenAI documents no null, and for keys of later clients."""
    call = {"id": "1", "type": None, "function": {"name": "now", "arguments": None}}
    messages = [{"role": "assistant", "tool_calls": [call], "later": None}]
    assert ChatBody.model_validate({"messages": messages, "later": None}).messages[0].plain() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
        ],
    }
    for model, required in (
        (TokenizeBody, {}),
        (SpeculationChange, {}),
        (DetokenizeBody, {"tokens": [1]}),
    ):
        assert model.model_validate({**required, "later": None}) == model.model_validate(required)


@pytest.mark.slow
def test_a_client_that_sends_every_key(server):
    """Null and neutral values of all keys at once give the same answer as no key."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        for create, hints, about in (
            (client.chat.completions.create, keys_of(CHATS[0]), {"messages": CHAT}),
            (client.completions.create, keys_of(TEXTS[0]), {"prompt": "Hello"}),
        ):
            about |= {"model": "zoo:target"}
            short = {"max_tokens": 4, "temperature": 0}
            expected = create(**about, **short).choices
            neutral = {key: NEUTRAL[key][-1] for key in hints if NEUTRAL[key]}
            if "prompt" in about:
                neutral["logprobs"] = None
            for values in (dict.fromkeys(hints), neutral):
                answer = create(**about, **values | short)
                assert answer.choices == expected
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="zoo:target", messages=CHAT, modalities=["text", "audio"]
            )
    assert refused.value.param == "modalities"


@pytest.mark.slow
def test_an_answer_names_its_service_tier_if_the_request_does(client):
    about = {"messages": CHAT, "max_tokens": 1, "service_tier": "priority"}
    answer = client.post("/v1/chat/completions", json=about).json()
    assert openapi.ChatCompletion.model_validate(answer).service_tier == "default"
    with client.stream("POST", "/v1/chat/completions", json=about | {"stream": True}) as response:
        assert {each["service_tier"] for each in events(response)} == {"default"}
    del about["service_tier"]
    assert "service_tier" not in client.post("/v1/chat/completions", json=about).json()
