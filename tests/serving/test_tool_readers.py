"""Parsers of tool calls: each format, parsed at once and in arbitrary pieces."""

import itertools
import json

import hypothesis
import jsonschema_rs
import pytest
from hypothesis import strategies as st

from draftwise.serving.tools.calls import Arguments, Call, Text
from draftwise.serving.tools.constrained import (
    CallListReader,
    NamedCallReader,
    arguments_schema,
    calls_schema,
)
from draftwise.serving.tools.tagged import PARSERS, HermesReader, Llama3JsonReader, detect_parser
from draftwise.serving.tools.tooling import ToolAnswer

NAMES = ["add", "get_weather"]
ADD = '{"name": "add", "arguments": {"a": 1, "b": "}</tool>"}}'
WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}'
ADD_3 = ADD.replace("arguments", "parameters")
WEATHER_3 = WEATHER.replace("arguments", "parameters")
ADDED = ("add", {"a": 1, "b": "}</tool>"})
ASKED = ("get_weather", {"city": "Zürich 😀"})
# Calls that differ from the prescribed form: arguments as a string, null or missing, parameters in
# place of arguments, tags within a string, and a line break that is not escaped.
VARIANTS = [
    (json.dumps({"name": "add", "arguments": json.dumps(ADDED[1])}), ADDED),
    (json.dumps({"arguments": ADDED[1], "name": "add"}, indent=2), ADDED),
    ('{"name": "add", "arguments": null}', ("add", {})),
    ('{"name": "add", "parameters": null}', ("add", {})),
    ('{"name": "add", "arguments": ""}', ("add", {})),
    ('{"name": "add", "arguments": "null"}', ("add", {})),
    ('{"name": "add"}', ("add", {})),
    ('{"type": "function", "id": "1", "name": "add"}', ("add", {})),
    (ADD_3, ADDED),
    (ADD, ADDED),
    *(
        (json.dumps({"name": "add", "arguments": {"a": each}}), ("add", {"a": each}))
        for each in (
            "</tool_call>",
            "<tool_call>",
            f"<tool_call>{ADD}</tool_call>",
            "<|python_tag|>",
            '"}]\\',
            "\\",
        )
    ),
    ('{"name": "add", "arguments": {"a": "x\ny"}}', ("add", {"a": "x\ny"})),
]
# JSON that is no call of a known function: it stays text.
OTHERS = [
    '{"name": "unknown", "arguments": {}}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": "5"}',
    '{"name": "add", "arguments": "{"}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    '{"name": "add", "a": 1}',
    '{"name": "add", "arguments": {}, "parameters": {"a": 1}}',
    '{"name": "add", "arguments": {"a": 1]}',
    '{"name": "add" "arguments": {}}',
    '{"arguments": {}}',
    '{"name": 1}',
    "{}",
]


def read(reader, pieces):
    """The text and the calls of an answer."""
    events = [event for piece in pieces for event in reader.read(piece)] + reader.finish()
    text, calls = "", []
    for event in events:
        match event:
            case Text(more):
                text += more
            case Call(name):
                calls.append([name, ""])
            case Arguments(more):
                calls[-1][1] += more
    return text, [tuple(each) for each in calls]


def parsed(reader, answer):
    text, calls = read(reader, [answer])
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


HERMES = [
    ("Hello.", "Hello.", []),
    ("", "", []),
    (" \n", " \n", []),
    (f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
    (f"<tool_call>{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n", "", [ADDED, ASKED]),
    (f"Let me see.\n\n<tool_call>{ADD}</tool_call>", "Let me see.", [ADDED]),
    (f"<tool_call>{ADD}</tool_call> and then", " and then", [ADDED]),
    (f"<tool_call>{ADD}", "", [ADDED]),  # the closing tag is missing
    ("<tool_call>not JSON</tool_call> on", "<tool_call>not JSON</tool_call> on", []),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ('<tool_call>{"name": "add", "arg', '<tool_call>{"name": "add", "arg', []),
    (
        f" <tool_call>x</tool_call> <tool_call>{ADD}</tool_call>",
        " <tool_call>x</tool_call>",
        [ADDED],
    ),
    ("a < b and <tool", "a < b and <tool", []),
    ("</tool_call>", "</tool_call>", []),
    ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    # Tags that no call follows.
    (f"No <tool_call> yet.\n<tool_call>{ADD}</tool_call>", "No <tool_call> yet.", [ADDED]),
    (f"<tool_call>\n<tool_call>{ADD}</tool_call>", "<tool_call>", [ADDED]),
    (f"<tool_call>{{it is <tool_call>{ADD}</tool_call>", "<tool_call>{it is", [ADDED]),
    (f'<tool_call>{{"a": "<tool_call>{ADD}', '<tool_call>{"a": "', [ADDED]),
    (f"<tool_call></tool_call><tool_call>{ADD}", "<tool_call></tool_call>", [ADDED]),
    ("<tool_call> ", "<tool_call> ", []),
    # Calls without a tag.
    (f"{ADD}\n", "", [ADDED]),
    (f"{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call>", "", [ADDED, ASKED]),
    (f"So {ADD}", f"So {ADD}", []),
    ('{"answer": 5}', '{"answer": 5}', []),
    # Several calls after one tag, and an incomplete or superfluous end.
    (f"<tool_call>\n{ADD}\n{WEATHER}\n</tool_call>", "", [ADDED, ASKED]),
    (f"<tool_call>{ADD}<tool_call>{WEATHER}", "", [ADDED, ASKED]),
    (f"<tool_call>{ADD}\n</tool", "", [ADDED]),
    (f"<tool_call>{ADD}}}</tool_call>", "}</tool_call>", [ADDED]),
    (f'<tool_call>{ADD}{{"a": 1}}', '{"a": 1}', [ADDED]),
    (f'<tool_call>{ADD}</tool_call><tool_call>{{"na', '<tool_call>{"na', [ADDED]),
    *((f"<tool_call>{text}</tool_call>", "", [call]) for text, call in VARIANTS),
    *((f"<tool_call>{text}</tool_call>",) * 2 + ([],) for text in OTHERS),
]
LLAMA = [
    ("Hello.", "Hello.", []),
    ("", "", []),
    (" \n", " \n", []),
    (ADD_3, "", [ADDED]),
    (f"  {ADD_3}\n", "", [ADDED]),
    (ADD, "", [ADDED]),  # some write arguments
    (f"{ADD_3}; {WEATHER_3}", "", [ADDED, ASKED]),
    (f"<|python_tag|>{ADD_3}", "", [ADDED]),
    (f"Let me see. <|python_tag|> {ADD_3};{WEATHER_3};", "Let me see.", [ADDED, ASKED]),
    ('{"type": "function", ' + ADD_3[1:], "", [ADDED]),
    ('{"answer": 5}', '{"answer": 5}', []),
    ('{"name": "Tom", "age": 5}', '{"name": "Tom", "age": 5}', []),
    ('{"name": "add", "parameters": {"a', '{"name": "add", "parameters": {"a', []),
    ('<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
    ("<|python", "<|python", []),
    (f"{ADD_3} and on ", " and on", [ADDED]),
    (f"So {ADD_3}", f"So {ADD_3}", []),  # a call is the whole text, or follows the tag
    ("{ }", "{ }", []),
    ('{"name": ' + "[" * 5000, '{"name": ' + "[" * 5000, []),
    (f"No <|python_tag|> yet. <|python_tag|>{ADD_3}", "No <|python_tag|> yet.", [ADDED]),
    (f'{{"a": 1}} <|python_tag|>{ADD_3}', '{"a": 1}', [ADDED]),
    (f"<|python_tag|>{ADD_3}; <|python_tag|>{WEATHER_3}", "", [ADDED, ASKED]),
    (f"{ADD_3} and <|python_tag|>{WEATHER_3}", " and", [ADDED, ASKED]),
    (f"{ADD_3}, {WEATHER_3}\n", "", [ADDED, ASKED]),
    (f'{ADD_3}; {{"name": "a', '; {"name": "a', [ADDED]),
    (f"{ADD_3}; <|py", "; <|py", [ADDED]),
    *((text, "", [call]) for text, call in VARIANTS),
    *((text, text, []) for text in OTHERS),
]


@pytest.mark.parametrize(("new", "answers"), [(HermesReader, HERMES), (Llama3JsonReader, LLAMA)])
def test_calls_in_each_format(new, answers):
    for answer, text, calls in answers:
        assert parsed(new(NAMES), answer) == (text, calls), answer


@st.composite
def cut(draw, answers):
    """An answer, and pieces of it."""
    answer = draw(answers)
    places = sorted(draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    ends = [0, *places, len(answer)]
    return answer, [answer[a:b] for a, b in itertools.pairwise(ends)]


_PARTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", ADD, WEATHER, ADD_3, WEATHER_3]
_PARTS += [text for text, _ in VARIANTS]
_PARTS += ["{", "}", "<", ";", " ", "\n", "Hello", '{"name"', '{"a": 1}', "[", "]", ",", '"']
mixed = st.lists(st.sampled_from(_PARTS), max_size=8).map("".join)
answers = mixed | st.sampled_from([each[0] for each in (*HERMES, *LLAMA) if len(each[0]) < 1000])


@pytest.mark.slow
@pytest.mark.parametrize(
    "new", [*PARSERS.values(), CallListReader, lambda _: NamedCallReader("add")]
)
@hypothesis.given(case=cut(answers))
@hypothesis.settings(max_examples=400, deadline=None)
def test_pieces_give_the_same_result_as_the_whole(new, case):
    answer, pieces = case
    whole = read(new(NAMES), [answer])
    assert read(new(NAMES), pieces) == whole
    assert read(new(NAMES), list(answer)) == whole


@pytest.mark.parametrize("new", PARSERS.values())
def test_too_deeply_nested_calls_cause_no_error(new):
    """The nesting limits of decoding and encoding differ."""
    for depth in (*range(880, 1000, 3), 100_000):
        reader = new(["add"])
        deep = "[" * depth + "]" * depth
        call = f'{{"name": "add", "arguments": {{"a": {deep}}}, "parameters": {{"a": {deep}}}}}'
        reader.read(f"<tool_call>{call}</tool_call>" if new is HermesReader else call)
        reader.finish()


@pytest.mark.parametrize("new", PARSERS.values())
@hypothesis.given(answer=mixed)
@hypothesis.settings(max_examples=300, deadline=None)
def test_text_without_calls_is_kept(new, answer):
    text, calls = read(new(NAMES), [answer])
    if not calls:
        assert text == answer
    for part in ("Hello", '{"a": 1}'):  # neither belongs to a call or contains one
        assert text.count(part) == answer.count(part)


scalars = st.text(max_size=8) | st.integers() | st.booleans() | st.none()
TAGS = ["<tool_call>", "<|python_tag|>"]
tags = st.sampled_from(["</tool_call>", '"}', "\\", *TAGS])
objects = st.dictionaries(st.text(max_size=5) | tags, scalars | tags | st.lists(tags), max_size=3)


@st.composite
def texts_and_calls(draw):
    """Texts that contain no call, each but the last before a call, and the calls."""
    parts = ["Hello", " ", "\n", "<", "{", '{"', "}", '{"name": "x"', "</tool_call>", *TAGS]
    text = st.lists(st.sampled_from(parts), max_size=5).map("".join)
    calls = draw(st.lists(objects, max_size=3))
    written = [
        json.dumps(
            {"name": "add", "arguments": draw(st.sampled_from([call, json.dumps(call)]))},
            indent=draw(st.sampled_from([None, 1])),
            ensure_ascii=draw(st.booleans()),
        )
        for call in calls
    ]
    return [draw(text) for _ in range(len(calls) + 1)], written, calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "begin", "end"),
    [(HermesReader, TAGS[0], "</tool_call>"), (Llama3JsonReader, TAGS[1], ";")],
)
@hypothesis.given(case=texts_and_calls())
@hypothesis.settings(max_examples=200, deadline=None)
def test_all_calls_between_any_texts_are_found(new, begin, end, case):
    """Tags and brackets in texts hide no call, those in arguments end none, and nothing is lost."""
    texts, written, calls = case
    answer = texts[0]
    for call, text in zip(written, texts[1:], strict=True):
        answer += f"{begin}{call}{end}:{text}"  # the colon ends the calls of this tag
    text, made = parsed(new(NAMES), answer)
    assert made == [("add", call) for call in calls]
    expected = (";:" if new is Llama3JsonReader else ":").join(texts)
    assert "".join(text.split()) == "".join(expected.split())


@pytest.mark.parametrize(
    ("new", "answer", "before"),
    [
        (HermesReader, f"See:\n<tool_call>\n{ADD}\n</tool_call>", "See:"),
        (Llama3JsonReader, f"See: <|python_tag|>{ADD_3};", "See:"),
        (Llama3JsonReader, ADD_3, ""),
    ],
)
def test_a_truncated_answer_loses_nothing(new, answer, before):
    """It is text until its call is complete."""
    end = answer.rindex("}") + 1
    for length in range(len(answer) + 1):
        expected = (before, [ADDED]) if length >= end else (answer[:length], [])
        assert parsed(new(NAMES), answer[:length]) == expected


@pytest.mark.parametrize("new", PARSERS.values())
def test_an_answer_of_nothing_but_tags_is_text(new):
    """Each tag and bracket may begin a call that spans the rest of the answer."""
    for part in ('<tool_call>{"a":"', "<tool_call>{", "<|python_tag|>{", '<|python_tag|>{"'):
        answer = part * 2000
        assert parsed(new(NAMES), answer) == (answer, [])


@pytest.mark.parametrize("new", PARSERS.values())
def test_other_json_is_not_held_back(new):
    assert new(NAMES).read('{"answer": [') == [Text('{"answer": [')]


def test_a_tag_without_a_call_is_not_held_back():
    reader = HermesReader(NAMES)
    assert reader.read("A <tool_call> is") == [Text("A"), Text(" <tool_call>"), Text(" is")]
    assert reader.read(" <tool_call>{it") == [Text(" <tool_call>"), Text("{it")]


def test_unpaired_surrogates_stay_escaped():
    """Text that contains one cannot be encoded in UTF-8."""
    call = '{"name": "add", "arguments": {"a": "\\ud800é"}}'
    _, [(_, arguments)] = read(HermesReader(NAMES), [f"<tool_call>{call}</tool_call>"])
    arguments.encode()
    assert json.loads(arguments) == {"a": "\ud800é"}


def test_a_list_of_calls_is_parsed():
    answer = f"[{ADD_3}, {WEATHER_3}]"
    assert parsed(CallListReader(NAMES), answer) == ("", [ADDED, ASKED])
    assert parsed(CallListReader(NAMES), answer[:-10]) == (WEATHER_3[:-9], [ADDED])
    assert parsed(CallListReader(NAMES), "[") == ("", [])


def test_arguments_are_streamed():
    reader = NamedCallReader("add")
    assert reader.read("") == []
    assert reader.read('{"a"') == [Call("add"), Arguments('{"a"')]
    assert reader.read(": 1}") == [Arguments(": 1}")]
    assert reader.finish() == []


def deltas(answer, pieces):
    """The message as OpenAI's clients assemble it from deltas."""
    content, calls = "", []
    for number, piece in enumerate(pieces):
        delta = answer.delta(piece, number == len(pieces) - 1)
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            assert call["index"] in (len(calls), len(calls) - 1)
            if call["index"] == len(calls):
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                calls.append(dict(call["function"]))
            else:
                assert "id" not in call
                calls[-1]["arguments"] += call["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize("parallel", [True, False])
def test_deltas_concatenate_to_the_message(parallel):
    text = f"See:\n<tool_call>{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call>"
    message = ToolAnswer(HermesReader(NAMES), parallel).message(text)
    assert message["content"] == "See:"
    assert len(message["tool_calls"]) == 1 + parallel
    assert len({call["id"] for call in message["tool_calls"]}) == 1 + parallel
    functions = [call["function"] for call in message["tool_calls"]]
    for pieces in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
        answer = ToolAnswer(HermesReader(NAMES), parallel)
        assert deltas(answer, pieces) == ("See:", functions)
    named = ToolAnswer(NamedCallReader("add"), parallel)
    assert deltas(named, list('{"a": 1}')) == ("", [{"name": "add", "arguments": '{"a": 1}'}])


def test_a_message_without_text_has_no_content():
    assert ToolAnswer(HermesReader(NAMES), True).message(f"<tool_call>{ADD}")["content"] is None
    assert ToolAnswer(HermesReader(NAMES), True).message("") == {"content": ""}


NODE = {
    "type": "object",
    "properties": {
        "value": {"$ref": "#/$defs/value"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "kind": {"enum": [{"$ref": "#/kept"}, "plain"]},
    },
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "integer"}},
}
TEXTS = {**NODE, "$defs": {"value": {"type": "string"}}}


def test_references_stay_within_the_schema_of_their_function():
    """Two functions whose definitions have the same name, one of them recursive."""
    schema = calls_schema([("count", NODE), ("write", TEXTS), ("stop", None)], True)
    good = [
        [{"name": "count", "parameters": {"value": 1, "next": {"value": 2, "next": None}}}],
        [{"name": "write", "parameters": {"value": "a"}}, {"name": "stop", "parameters": {}}],
        [{"name": "count", "parameters": {"value": 1, "kind": {"$ref": "#/kept"}}}],
    ]
    bad = [
        [],
        [{"name": "count", "parameters": {"value": "a"}}],
        [{"name": "count", "parameters": {"value": 1, "next": {"value": "b"}}}],
        [{"name": "write", "parameters": {"value": 1}}],
        [{"name": "stop", "parameters": {"value": 1}}],
        [{"name": "other", "parameters": {}}],
    ]
    assert all(jsonschema_rs.is_valid(schema, each) for each in good)
    assert not any(jsonschema_rs.is_valid(schema, each) for each in bad)
    single = calls_schema([("stop", None)], False)
    assert not jsonschema_rs.is_valid(single, [{"name": "stop", "parameters": {}}] * 2)
    assert jsonschema_rs.is_valid(arguments_schema(NODE), {"value": 1})


def test_the_parser_is_detected_from_the_template():
    for template, parser in (
        ("{{ '<tool_call>' }}{% for tool in tools %}", "hermes"),
        ('{{ \'{"name": …, "parameters": {}}\' }} Environment: ipython', "llama3_json"),
        ('<|python_tag|> "parameters"', "llama3_json"),
        ("<tool_call><function=name>", None),
        ("{{ messages }}", None),
        (None, None),
        ({"default": "{{ messages }}", "tool_use": "<tool_call>"}, "hermes"),
        ({"default": "<tool_call>"}, "hermes"),
    ):
        assert detect_parser(template) == parser
