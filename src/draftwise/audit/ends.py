"""Where answers end, what is counted, and how they are sent, with and without speculation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from draftwise.audit.answers import Response
from draftwise.audit.client import Model, Server
from draftwise.audit.context import Context
from draftwise.audit.findings import Case, Finding, Status, counted, failed, not_audited, passed
from draftwise.audit.greedy import Row

STOPS, LIMITS, USAGE = "stop strings", "limits of tokens", "usage counts"
STREAMS, SEVERAL, SEEDS = "streams", "n > 1", "seeds"
_LIMITS = (1, 2, 3, 5, 8)
_STOP_CHARACTERS = 3
_NUM_ROWS = 4
_NUM_SEVERAL = 8


def stop_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Stop strings end the text before them, with the same tokens as without speculation."""
    bodies = [
        (row.prompt, {"stop": [stop], "max_tokens": context.settings.max_tokens})
        for row in _shortest(rows)
        for stop in _stops(row.reference.answers[0].text)
    ]
    return _same_ends(context, STOPS, bodies)


def limit_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Answers have as many tokens as they may have."""
    bodies = [(row.prompt, {"max_tokens": limit}) for limit in _LIMITS for row in _shortest(rows)]
    return _same_ends(context, LIMITS, bodies)


def usage_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Counts are those of the tokens, and add up."""
    mistakes: list[tuple[Row, str, str]] = []
    num_counted = 0
    for row in rows:
        ours, theirs = row.alone.usage, row.reference.usage
        if "completion_tokens" not in ours:
            continue
        num_counted += 1
        # The token that ends a text is counted by some servers, and listed by others.
        tokens = row.alone.answers[0].tokens
        listed = None if tokens is None else len(tokens)
        count = ours["completion_tokens"]
        if listed is not None and not listed <= count <= listed + 1:
            mistakes.append((row, f"{listed} completion tokens", str(count)))
        for name in ("prompt_tokens", "completion_tokens"):
            if name in theirs and ours.get(name) != theirs[name]:
                mistakes.append((row, f"{name} {theirs[name]}", str(ours.get(name))))
        if ours.get("total_tokens") != ours.get("prompt_tokens", 0) + count:
            mistakes.append((row, "total_tokens is the sum", str(dict(ours))))
    if not num_counted:
        return not_audited(USAGE, "the server reports none")
    if not mistakes:
        return passed(USAGE, f"those of {counted(num_counted, 'answer')} are right")
    row, expected, found = mistakes[0]
    fields = {"max_tokens": context.settings.max_tokens, "temperature": 0.0}
    detail = f"{len(mistakes)} of {counted(num_counted, 'answer')} are wrong"
    return failed(USAGE, detail, Case(_commands(context, row.prompt, fields), expected, found))


def stream_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Streams, joined, are the whole answers."""
    several = _shortest(rows)
    if not several:
        return not_audited(STREAMS, "no greedy answers are equal")
    options = {"stream_options": {"include_usage": True}}
    for row in several:
        fields: dict[str, Any] = {"max_tokens": context.settings.max_tokens, "temperature": 0.0}
        streamed = context.server.stream(row.prompt, **fields, **options)
        whole = row.alone
        if streamed.num_tokens is None:  # some servers count no tokens of streams
            whole = Response(whole.answers, {})
        if _end(streamed) != _end(whole):
            command = context.server.command(row.prompt, **fields, stream=True, **options)
            case = Case((command,), str(_end(whole)), str(_end(streamed)))
            return failed(STREAMS, "a stream differs from the whole answer", case)
    return passed(STREAMS, f"{counted(len(several), 'stream')} equal the whole answers")


def several_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Greedy answers to one request are equal, sampled ones are not."""
    if not context.own.has_n:
        return not_audited(SEVERAL, "one of the servers gives one answer to a request")
    for row in _shortest(rows):
        fields: dict[str, Any] = {"max_tokens": 16, "n": 3}
        response = context.server.ask(row.prompt, temperature=0.0, **fields)
        single = context.server.ask(row.prompt, temperature=0.0, max_tokens=16)
        texts = [answer.text for answer in response.answers]
        expected = [single.answers[0].text] * 3
        count = response.num_tokens
        if response.indices != (0, 1, 2) or texts != expected:
            case = Case(
                (context.server.command(row.prompt, temperature=0.0, **fields),),
                f"answers 0, 1 and 2: {expected}",
                f"answers {response.indices}: {texts}",
            )
            return failed(SEVERAL, "greedy answers of one request differ", case)
        if count is not None and single.num_tokens is not None and count != 3 * single.num_tokens:
            command = context.server.command(row.prompt, temperature=0.0, **fields)
            case = Case((command,), f"{3 * single.num_tokens} completion tokens", str(count))
            return failed(SEVERAL, "the tokens of several answers are miscounted", case)
    for row in _shortest(rows):
        fields = {"max_tokens": 16, "n": _NUM_SEVERAL, "temperature": 1.0}
        ours, theirs = (
            {answer.text for answer in model.ask(row.prompt, **fields).answers}
            for model in _models(context)
        )
        if len(ours) == 1 and len(theirs) > 2:
            case = Case(
                _commands(context, row.prompt, fields),
                f"{len(theirs)} different texts",
                f"{_NUM_SEVERAL} times {ours.pop()!r}",
            )
            return failed(SEVERAL, "all sampled answers of one request are equal", case)
    return passed(SEVERAL, "greedy answers of one request are equal, sampled ones differ")


def seed_finding(context: Context) -> Finding:
    """The same seed gives the same answer twice, where it does so without speculation."""
    prompts = context.prompts[:_NUM_ROWS]
    fields = {"max_tokens": 16, "temperature": 1.0, "seed": 7}
    repeated = [
        [
            _end(model.ask(prompt, **fields)) == _end(model.ask(prompt, **fields))
            for prompt in prompts
        ]
        for model in _models(context)
    ]
    ours, theirs = map(all, repeated)
    if not theirs:
        return not_audited(SEEDS, "the baseline's answers with a seed differ too")
    if ours:
        return passed(SEEDS, f"the same seed gave the same answer to {len(prompts)} prompts")
    reason = "the same seed gives different answers with speculation, and equal ones without"
    return Finding(SEEDS, Status.NOTED, reason)


def _same_ends(
    context: Context, check: str, bodies: Sequence[tuple[str, dict[str, Any]]]
) -> Finding:
    """Answers to these requests end like those of the baseline."""
    if not bodies:
        return not_audited(check, "no greedy answers are equal and long enough")
    note = ""
    for prompt, own in bodies:
        fields = {**own, "temperature": 0.0}
        ours, theirs = (model.ask(prompt, **fields) for model in _models(context))
        if ours.num_tokens is None or theirs.num_tokens is None:
            ours, theirs = Response(ours.answers, {}), Response(theirs.answers, {})
        if _end(ours) != _end(theirs):
            case = Case(_commands(context, prompt, fields), str(_end(theirs)), str(_end(ours)))
            return failed(check, f"an answer with {own} ends elsewhere", case)
        stop = own.get("stop", [""])[0]
        if stop and stop in ours.answers[0].text:
            note = "; both servers return the stop string"
    return passed(check, f"{counted(len(bodies), 'answer')} end as without speculation{note}")


def _end(response: Response) -> tuple[str, str | None, int | None]:
    """Text, reason of the end and number of tokens."""
    answer = response.answers[0]
    return answer.text, answer.finish_reason, response.num_tokens


def _stops(text: str) -> Iterator[str]:
    """Strings within a text that it has not had before, early, in the middle and late."""
    for share in (0.3, 0.5, 0.8):
        start = int(share * len(text))
        stop = text[start : start + _STOP_CHARACTERS]
        if start and len(stop.strip()) > 1 and text.index(stop) > 0:
            yield stop


def _shortest(rows: Sequence[Row]) -> list[Row]:
    """A few rows with the shortest prompts, for the smallest cases."""
    return sorted(rows, key=lambda row: len(row.prompt))[:_NUM_ROWS]


def _models(context: Context) -> tuple[Server, Model]:
    return context.server, context.baseline


def _commands(context: Context, prompt: str, fields: dict[str, Any]) -> tuple[str, ...]:
    return tuple(model.command(prompt, **fields) for model in _models(context))


ROW_CHECKS: tuple[tuple[str, Callable[[Context, Sequence[Row]], Finding]], ...] = (
    (STOPS, stop_finding),
    (LIMITS, limit_finding),
    (USAGE, usage_finding),
    (STREAMS, stream_finding),
    (SEVERAL, several_finding),
)
