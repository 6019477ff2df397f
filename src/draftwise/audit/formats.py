"""Constrained answers and tool calls, with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from draftwise.audit.answers import Answer
from draftwise.audit.client import Messages, Model
from draftwise.audit.context import Context
from draftwise.audit.findings import Case, Finding, Status, counted, failed, not_audited, passed
from draftwise.audit.greedy import Greedy
from draftwise.errors import ServerError

STRUCTURED, TOOLS = "structured output", "tool calls"
_COLOURS = ["red", "green", "blue"]
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": _COLOURS}, "bright": {"type": "boolean"}},
    "required": ["colour", "bright"],
    "additionalProperties": False,
}
_QUESTION = "Name a colour, as JSON with colour and bright:"
_FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": _SCHEMA}}
_TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paints a wall.", "parameters": _SCHEMA},
}
_MAX_TOKENS = 96
_NUM_SAMPLED = 8
Prompt = str | Messages


def structured_finding(context: Context, greedy: Greedy) -> Finding:
    """Constrained answers follow their schema; greedy ones are the baseline's."""
    way = next(_accepted_ways(context), None)
    if way is None:
        return not_audited(STRUCTURED, "one of the servers supports none")
    prompt, fields = way
    still = {**fields, "temperature": 0.0}
    theirs = context.baseline.ask(prompt, **still).answers[0]
    if not _is_valid(theirs):
        return not_audited(STRUCTURED, "the baseline's answer does not follow the schema either")
    ours = context.server.ask(prompt, **still).answers[0]
    if greedy.is_steady and ours.text != theirs.text:
        return _structured_failure(context, prompt, still, repr(theirs.text), ours)
    sampled = {**fields, "temperature": 1.0}
    answers = context.at_once(
        lambda _: context.server.ask(prompt, **sampled).answers[0], range(_NUM_SAMPLED)
    )
    complete = [answer for answer in answers if answer.finish_reason != "length"]
    for answer in complete:
        if not _is_valid(answer):
            return _structured_failure(context, prompt, sampled, json.dumps(_SCHEMA), answer)
    return passed(STRUCTURED, f"{counted(len(complete) + 1, 'answer')} follow a JSON schema")


def tool_finding(context: Context, greedy: Greedy) -> Finding:
    """Calls of functions are the baseline's."""
    fields: dict[str, Any] = {"tools": [_TOOL], "tool_choice": "required"}
    fields |= {"max_tokens": _MAX_TOKENS, "temperature": 0.0}
    messages = [{"role": "user", "content": "Paint the wall in a bright red."}]
    answers = []
    for model in (context.baseline, context.server):
        try:
            answers.append(model.ask(messages, **fields).answers[0])
        except ServerError as error:
            return not_audited(TOOLS, f"refused: {error.message}")
    theirs, ours = answers
    if not theirs.tool_calls:
        return not_audited(TOOLS, "the baseline's answer has none")
    if ours.tool_calls == theirs.tool_calls and ours.finish_reason == theirs.finish_reason:
        return passed(TOOLS, f"{counted(len(theirs.tool_calls), 'call')} as without speculation")
    if not greedy.is_steady:
        reason = "a call differs; the baseline's own answers vary by rounding"
        return Finding(TOOLS, Status.NOTED, reason)
    case = Case(
        tuple(m.command(messages, **fields) for m in (context.server, context.baseline)),
        str(theirs.tool_calls),
        str(ours.tool_calls or ours.text),
    )
    return failed(TOOLS, "a call differs from the baseline's", case)


def _accepted_ways(context: Context) -> Iterator[tuple[Prompt, dict[str, Any]]]:
    """The forms of a request for constrained text that both servers accept."""
    messages = [{"role": "user", "content": _QUESTION}]
    ways: tuple[tuple[Prompt, dict[str, Any]], ...] = (
        (_QUESTION, {"structured_outputs": {"json": _SCHEMA}}),
        (messages, {"response_format": _FORMAT}),
        (_QUESTION, {"response_format": _FORMAT}),
    )
    for prompt, own in ways:
        fields = {"max_tokens": _MAX_TOKENS, **own}
        models: tuple[Model, ...] = context.server, context.baseline
        with suppress(ServerError):
            answers = [model.ask(prompt, **fields).answers[0] for model in models]
            # Servers that ignore a field answer as they like.
            if any(map(_is_valid, answers)):
                yield prompt, fields


def _is_valid(answer: Answer) -> bool:
    """Whether an answer follows the schema."""
    try:
        value = json.loads(answer.text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and value.keys() == {"colour", "bright"}
        and value["colour"] in _COLOURS
        and isinstance(value["bright"], bool)
    )


def _structured_failure(
    context: Context, prompt: Prompt, fields: dict[str, Any], expected: str, answer: Answer
) -> Finding:
    commands = tuple(m.command(prompt, **fields) for m in (context.server, context.baseline))
    case = Case(commands, expected, repr(answer.text))
    return failed(STRUCTURED, "a constrained answer differs", case)
