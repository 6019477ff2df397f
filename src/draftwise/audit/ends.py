"""Where answers end, what is counted, and how they are sent, with and without speculation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from draftwise.audit.answers import Response
from draftwise.audit.client import Item
from draftwise.audit.context import Context
from draftwise.audit.findings import Case, Finding, counted, failed, not_audited, passed
from draftwise.audit.greedy import Row

STOPS, LIMITS, USAGE = "stop strings", "limits of tokens", "usage counts"
STREAMS = "streams"
NO_ROWS = "no greedy answers are equal"
_LIMITS = (1, 2, 3, 5, 8)
_STOP_CHARACTERS = 3
_NUM_ROWS = 4
# A difference that does not last is one of rounding.
_NUM_TRIALS = 3


def stop_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Stop strings end the text before them, with the same tokens as without speculation."""
    bodies = [
        (row.prompt, {"stop": [stop], "max_tokens": context.settings.max_tokens})
        for row in shortest(rows)
        for stop in _stops(row.reference.answers[0].text)
    ]
    return _same_ends(context, STOPS, bodies)


def limit_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Answers have as many tokens as they may have."""
    bodies = [(row.prompt, {"max_tokens": limit}) for limit in _LIMITS for row in shortest(rows)]
    return _same_ends(context, LIMITS, bodies)


def usage_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Counts are those of the tokens, and add up."""
    if not rows:
        return not_audited(USAGE, NO_ROWS)
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
    return failed(USAGE, detail, Case(context.commands(row.prompt, fields), expected, found))


def stream_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Streams, joined, are the whole answers."""
    several = shortest(rows)
    if not several:
        return not_audited(STREAMS, NO_ROWS)
    fields: dict[str, Any] = {"max_tokens": context.settings.max_tokens, "temperature": 0.0}
    options = {"stream_options": {"include_usage": True}}

    def wrong(row: Row) -> Finding | None:
        whole = context.server.ask(row.prompt, **fields)
        streamed = context.server.stream(row.prompt, **fields, **options)
        if streamed.num_tokens is None:  # some servers count no tokens of streams
            whole = Response(whole.answers, {})
        if end_of(streamed) == end_of(whole):
            return None
        command = context.server.command(row.prompt, **fields, stream=True, **options)
        case = Case((command,), str(end_of(whole)), str(end_of(streamed)))
        return failed(STREAMS, "a stream differs from the whole answer", case)

    finding = first_lasting(wrong, several)
    return finding or passed(STREAMS, f"{counted(len(several), 'stream')} equal the whole answers")


def _same_ends(
    context: Context, check: str, bodies: Sequence[tuple[str, dict[str, Any]]]
) -> Finding:
    """Answers to these requests end like those of the baseline."""
    if not bodies:
        return not_audited(check, "no greedy answers are equal and long enough")

    def wrong(body: tuple[str, dict[str, Any]]) -> Finding | None:
        prompt, own = body
        fields = {**own, "temperature": 0.0}
        ours, theirs = (model.ask(prompt, **fields) for model in context.models)
        if ours.num_tokens is None or theirs.num_tokens is None:
            ours, theirs = Response(ours.answers, {}), Response(theirs.answers, {})
        if end_of(ours) == end_of(theirs):
            return None
        case = Case(context.commands(prompt, fields), str(end_of(theirs)), str(end_of(ours)))
        return failed(check, f"an answer with {own} ends elsewhere", case)

    finding = first_lasting(wrong, bodies)
    return finding or passed(check, f"{counted(len(bodies), 'answer')} end as without speculation")


def first_lasting(wrong: Callable[[Item], Finding | None], items: Sequence[Item]) -> Finding | None:
    """The first failure that repetitions confirm; ``None`` for none.

    Args:
        wrong: asks, and returns a failure or ``None``.
        items: what to ask.
    """
    for item in items:
        for _ in range(_NUM_TRIALS):
            finding = wrong(item)
            if finding is None:
                break
        else:
            return finding
    return None


def end_of(response: Response) -> tuple[str, str | None, int | None]:
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


def shortest(rows: Sequence[Row]) -> list[Row]:
    """A few rows with the shortest prompts, for the smallest cases."""
    return sorted(rows, key=lambda row: len(row.prompt))[:_NUM_ROWS]


ROW_CHECKS: tuple[tuple[str, Callable[[Context, Sequence[Row]], Finding]], ...] = (
    (STOPS, stop_finding),
    (LIMITS, limit_finding),
    (USAGE, usage_finding),
    (STREAMS, stream_finding),
)
