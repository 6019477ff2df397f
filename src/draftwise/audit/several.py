"""Several answers to one request, and the same request with the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwise.audit.client import Model
from draftwise.audit.context import Context
from draftwise.audit.ends import NO_ROWS, end_of, first_lasting, shortest
from draftwise.audit.findings import Case, Finding, Status, failed, not_audited, passed
from draftwise.audit.greedy import Row
from draftwise.errors import ServerError

SEVERAL, SEEDS = "n > 1", "seeds"
_NUM_GREEDY, _NUM_SAMPLED, _NUM_PROMPTS = 3, 8, 4
_NUM_TOKENS = 16


def several_finding(context: Context, rows: Sequence[Row]) -> Finding:
    """Greedy answers to one request are equal, sampled ones are not."""
    if not context.own.has_n:
        return not_audited(SEVERAL, "one of the servers gives one answer to a request")
    if not rows:
        return not_audited(SEVERAL, NO_ROWS)

    shared: list[str] = []

    def wrong_greedy(row: Row) -> Finding | None:
        wrong = _wrong_answers(context.server, row.prompt)
        if wrong is None:
            return None
        if _wrong_answers(context.baseline, row.prompt) is not None:
            shared.append(f"{wrong.detail}; without speculation, too")
            return None
        return wrong

    def wrong_sampled(row: Row) -> Finding | None:
        fields = {"max_tokens": _NUM_TOKENS, "n": _NUM_SAMPLED, "temperature": 1.0}
        ours, theirs = (
            {answer.text for answer in model.ask(row.prompt, **fields).answers}
            for model in context.models
        )
        if len(ours) > 1 or len(theirs) <= 2:
            return None
        case = Case(
            context.commands(row.prompt, fields),
            f"{len(theirs)} different texts",
            f"{_NUM_SAMPLED} times {ours.pop()!r}",
        )
        return failed(SEVERAL, "all sampled answers to one request are equal", case)

    few = shortest(rows)
    detail = "greedy answers to one request are equal, and sampled ones differ"
    try:
        finding = first_lasting(wrong_greedy, few)
    except ServerError as error:
        if error.is_failure:
            raise
        # vLLM gives a single greedy answer to a request.
        finding, detail = None, f"sampled answers to one request differ; greedy: {error.message}"
    finding = finding or first_lasting(wrong_sampled, few)
    if finding is None and shared:
        return Finding(SEVERAL, Status.NOTED, shared[0])
    return finding or passed(SEVERAL, detail)


def _wrong_answers(model: Model, prompt: str) -> Finding | None:
    """What is wrong with several greedy answers to one request; ``None`` for nothing."""
    fields: dict[str, Any] = {"max_tokens": _NUM_TOKENS, "temperature": 0.0}
    single = model.ask(prompt, **fields)
    response = model.ask(prompt, **fields, n=_NUM_GREEDY)
    found = [*zip(response.indices, (each.text for each in response.answers), strict=True)]
    expected = [(index, single.answers[0].text) for index in range(_NUM_GREEDY)]
    command = (model.command(prompt, **fields, n=_NUM_GREEDY),)
    if found != expected:
        case = Case(command, f"answers {expected}", f"answers {found}")
        return failed(SEVERAL, "greedy answers to one request differ", case)
    counts = single.num_tokens, response.num_tokens
    if None not in counts and counts[1] != _NUM_GREEDY * (counts[0] or 0):
        case = Case(command, f"{_NUM_GREEDY} times {counts[0]} tokens", f"{counts[1]} tokens")
        return failed(SEVERAL, "usage counts the tokens of several answers wrong", case)
    return None


def seed_finding(context: Context) -> Finding:
    """The same seed gives the same answer twice, where it does so without speculation."""
    prompts = context.prompts[:_NUM_PROMPTS]
    fields = {"max_tokens": _NUM_TOKENS, "temperature": 1.0, "seed": 7}
    repeated = [
        [
            end_of(model.ask(prompt, **fields)) == end_of(model.ask(prompt, **fields))
            for prompt in prompts
        ]
        for model in context.models
    ]
    ours, theirs = map(all, repeated)
    if not theirs:
        return not_audited(SEEDS, "the baseline's answers with a seed differ too")
    if ours:
        return passed(SEEDS, f"the same seed gave the same answers to {len(prompts)} prompts")
    reason = "the same seed gives different answers with speculation, and equal ones without"
    return Finding(SEEDS, Status.NOTED, reason)
