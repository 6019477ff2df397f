"""Prompts that begin alike, one after another, as a prefix cache sees them."""

from __future__ import annotations

from collections.abc import Iterator

from draftwise.audit.context import Context
from draftwise.audit.findings import Case, Finding, counted, failed, passed
from draftwise.audit.greedy import Greedy, difference

PREFIXES = "the same prefix twice"
_MOST_CHARACTERS = 400
_NUM_ENDINGS = 4


def prefix_finding(context: Context, greedy: Greedy) -> Finding:
    """Answers after a common prefix are the baseline's, whatever followed the prefix before."""
    scores = context.abilities.scores()
    fields = {"max_tokens": min(24, context.settings.max_tokens), "temperature": 0.0}
    num_answers, num_explained = 0, 0
    known = {}
    for prompts in _conversations(context):
        before: list[str] = []
        for prompt in prompts:
            before.append(prompt)
            if prompt not in known:
                known[prompt] = context.baseline.ask(prompt, **fields, **scores)
            ours = context.server.ask(prompt, **fields)
            num_answers += 1
            where = difference(known[prompt], ours)
            if where is None:
                continue
            if greedy.explains(where):
                num_explained += 1
                continue
            commands = [context.server.command(each, **fields) for each in before[-2:]]
            case = Case(
                (*commands, context.baseline.command(prompt, **fields)),
                repr(known[prompt].answers[0].text),
                repr(ours.answers[0].text),
            )
            return failed(PREFIXES, "an answer depends on what was asked before", case)
    detail = f"{counted(num_answers, 'answer')} equal the baseline's"
    return passed(PREFIXES, detail + (f", {num_explained} by rounding" if num_explained else ""))


def _conversations(context: Context) -> Iterator[list[str]]:
    """Prompts with a short and with a long common prefix; each comes twice."""
    prompts = [prompt for prompt in context.prompts if len(prompt) < _MOST_CHARACTERS // 4]
    endings = prompts[:_NUM_ENDINGS] or context.prompts[:1]
    for size in (1, 5):
        prefix = "\n".join(prompts[-size:])[:_MOST_CHARACTERS]
        several = [f"{prefix}\n{ending}" for ending in endings]
        yield [*several, *several]
