"""Greedy answers with and without speculation, and what rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

from draftwise.audit.answers import Answer, Response, without_blanks
from draftwise.audit.budget import SpentError
from draftwise.audit.context import Context
from draftwise.audit.findings import Case, Finding, counted, failed, not_audited, passed
from draftwise.audit.rereading import Rereader, change, margin_change
from draftwise.errors import ServerError

# Log-probabilities are printed with about this precision.
_PRECISION, _STEADY = 1e-4, 1e-3
_MOST_TRIALS = 8
_CHUNK = 8
# Shares of an answer after which the baseline reads what it has generated.
_REREAD = (0.9, 0.5)
GREEDY, AT_ONCE, LOGPROBS = "greedy answers", "greedy answers at once", "log-probabilities"


@dataclass(frozen=True)
class Difference:
    """Where two greedy answers differ.

    Attributes:
        position: first token of the reference that differs; its number of tokens if it ended.
        margin: difference of the two best log-probabilities of the reference there; ``None`` if
            they are not known.
    """

    position: int
    margin: float | None


@dataclass(frozen=True)
class Row:
    """The answers to one prompt.

    Attributes:
        prompt: the prompt.
        reference: answer of the baseline alone.
        repeated: the baseline's answers to the same request, alone and with others at once.
        alone: answer of the audited server alone.
        at_once: its answer while it answers the other prompts.
    """

    prompt: str
    reference: Response
    repeated: tuple[Response, ...]
    alone: Response
    at_once: Response


@dataclass
class Greedy:
    """All greedy answers.

    Attributes:
        rows: those to each prompt.
        allowance: differences of log-probabilities up to this are explained by rounding.
        reread_change: the largest change of the log-probability of a token of the baseline if it
            reads the tokens before in place of generating them.
    """

    rows: list[Row] = field(default_factory=list)
    allowance: float = _PRECISION
    reread_change: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Whether rounding hardly changes the baseline's log-probabilities."""
        return self.allowance <= _STEADY

    def explains(self, difference: Difference) -> bool:
        """Whether rounding explains a difference."""
        return difference.margin is not None and difference.margin <= self.allowance

    def agreed(self) -> list[Row]:
        """Rows in which all answers are equal."""
        return [
            row
            for row in self.rows
            if not any(
                difference(row.reference, other)
                for other in (*row.repeated, row.alone, row.at_once)
            )
        ]


def difference(reference: Response, other: Response) -> Difference | None:
    """The first difference of two greedy answers; ``None`` if they are equal."""
    one, two = reference.answers[0], other.answers[0]
    tokens = one.tokens or ()
    if one.text == two.text:
        counts = reference.num_tokens, other.num_tokens
        if one.finish_reason == two.finish_reason and (None in counts or counts[0] == counts[1]):
            return None
        return _at(one, len(tokens) - 1 if tokens else len(one.text))
    pieces, texts = [token.text for token in tokens], [one.text, two.text]
    if not "".join(pieces).startswith(one.text):
        pieces, texts = list(map(without_blanks, pieces)), list(map(without_blanks, texts))
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    length = sum(1 for _ in equal)
    if not tokens:
        return Difference(length, None)
    ends = accumulate(len(piece) for piece in pieces)
    position = next((index for index, end in enumerate(ends) if end > length), len(tokens))
    return _at(one, position)


def _at(answer: Answer, position: int) -> Difference:
    tokens = answer.tokens or ()
    return Difference(position, tokens[position].margin if 0 <= position < len(tokens) else None)


def ask_greedily(context: Context) -> Greedy:
    """Ask both servers all prompts; stops early at the limit of the audit."""
    settings = context.settings
    fields: dict[str, Any] = {"max_tokens": settings.max_tokens, "temperature": 0.0}
    scored, own = fields | context.abilities.scores(), fields | context.own.scores()
    greedy = Greedy()
    prompts = context.prompts[: settings.num_prompts]
    for start in range(0, len(prompts), _CHUNK):
        some = prompts[start : start + _CHUNK]
        try:
            first = [context.baseline.ask(prompt, **scored) for prompt in some]
            again = [context.baseline.ask(prompt, **scored) for prompt in some]
            batch = context.at_once(lambda p: context.baseline.ask(p, **scored), some * 2)
            alone = [context.server.ask(prompt, **own) for prompt in some]
            others = context.at_once(lambda p: context.server.ask(p, **fields), some * 2)
        except SpentError:
            break
        for index, prompt in enumerate(some):
            repeated = again[index], batch[index], batch[index + len(some)]
            answers = others[index], others[index + len(some)]
            # Of two answers to the same request, the one that differs.
            other = next((each for each in answers if difference(first[index], each)), answers[0])
            greedy.rows.append(Row(prompt, first[index], repeated, alone[index], other))
    greedy.allowance = _allowance(greedy.rows)
    with suppress(SpentError):  # what was read so far counts
        _reread(context, greedy)
    return greedy


def _reread(context: Context, greedy: Greedy) -> None:
    """Let the baseline read its answers, and add what that changes to the allowance.

    Prompts take turns, as servers keep the passes of the last ones.
    """
    count = context.abilities.num_greedy_logprobs
    if not count or context.settings.chat:
        return
    reader = Rereader(context.baseline, count, 0.0)
    for share in _REREAD:
        for row in greedy.rows:
            tokens = row.reference.answers[0].tokens or ()
            place = int(share * len(tokens))
            texts = [token.text for token in tokens[:place]]
            if not texts or not row.reference.answers[0].text.startswith("".join(texts)):
                continue
            num_prompt_tokens = row.reference.usage.get("prompt_tokens")
            again = reader.next_token(row.prompt, texts, num_prompt_tokens)
            if again is not None:
                greedy.allowance = max(greedy.allowance, margin_change(tokens[place], again))
                greedy.reread_change = max(greedy.reread_change, change(tokens[place], again))


def _allowance(rows: Sequence[Row]) -> float:
    """The largest change of a margin, or margin of a change, in the baseline's own answers."""
    largest = _PRECISION
    for row in rows:
        one = row.reference.answers[0].tokens or ()
        for other in row.repeated:
            where = difference(row.reference, other)
            end = len(one) if where is None else where.position
            for a, b in zip(one[:end], (other.answers[0].tokens or ())[:end], strict=False):
                if a.margin is not None and b.margin is not None:
                    largest = max(largest, abs(a.margin - b.margin))
            if where is not None and where.margin is not None:
                largest = max(largest, where.margin)
    return largest


def greedy_findings(context: Context, greedy: Greedy) -> list[Finding]:
    """What the greedy answers say."""
    if not greedy.rows:
        reason = "the limit of requests or time was reached before"
        return [not_audited(each, reason) for each in (GREEDY, AT_ONCE, LOGPROBS)]
    return [
        _compared(context, greedy, GREEDY, lambda row: row.alone),
        _compared(context, greedy, AT_ONCE, lambda row: row.at_once),
        _logprobs(context, greedy),
    ]


def _compared(
    context: Context, greedy: Greedy, check: str, answer: Callable[[Row], Response]
) -> Finding:
    found = [(row, difference(row.reference, answer(row))) for row in greedy.rows]
    differing = [(row, each) for row, each in found if each is not None]
    wrong = [(row, each) for row, each in differing if not greedy.explains(each)]
    unsteady = [
        row for row, _ in wrong if any(difference(row.reference, other) for other in row.repeated)
    ]
    # Without log-probabilities, only prompts that the baseline always answers alike tell something.
    if not context.abilities.num_greedy_logprobs:
        wrong = [(row, each) for row, each in wrong if row not in unsteady]
    num_equal = len(found) - len(differing)
    detail = f"{num_equal} of {counted(len(found), 'answer')} equal the baseline's"
    num_explained = len(differing) - len(wrong)
    if num_explained:
        detail += f", {num_explained} differ by rounding"
    if not wrong:
        return passed(check, f"{detail} (margins up to {greedy.allowance:.2g} count as rounding)")
    row, first = min(wrong, key=lambda pair: (pair[1].position, len(pair[0].prompt)))
    margin = "unknown" if first.margin is None else f"{first.margin:.3g}"
    detail += (
        f", {len(wrong)} differ; the first at token {first.position + 1} with a margin of {margin} "
        f"(the baseline itself varies by {greedy.allowance:.2g})"
    )
    return failed(check, detail, _case(context, greedy, row, first, answer(row)))


def _case(context: Context, greedy: Greedy, row: Row, first: Difference, found: Response) -> Case:
    """The shortest prompt and answer that still differ."""
    prompt, length = row.prompt, first.position + 1
    expected = row.reference
    scores = context.abilities.scores()
    words = prompt.split(" ")
    candidates = [" ".join(words[-size:]) for size in _sizes(len(words))]
    try:
        for candidate in filter(str.strip, [prompt, *candidates][:_MOST_TRIALS]):
            fields = {"max_tokens": max(4, length), "temperature": 0.0}
            theirs = context.baseline.ask(candidate, **fields, **scores)
            ours = context.server.ask(candidate, **fields)
            differs = difference(theirs, ours)
            if differs is None or greedy.explains(differs):
                continue
            prompt, expected, found = candidate, theirs, ours
    except (SpentError, ServerError):
        pass  # the case is not made smaller
    fields = {"max_tokens": max(4, length), "temperature": 0.0}
    return Case(
        context.commands(prompt, fields),
        repr(expected.answers[0].text),
        repr(found.answers[0].text),
    )


def _sizes(num_words: int) -> list[int]:
    """Numbers of last words to try, from many to few."""
    sizes = []
    while num_words > 1:
        num_words //= 2
        sizes.append(num_words)
    return sizes


def _logprobs(context: Context, greedy: Greedy) -> Finding:
    if not context.own.num_greedy_logprobs or not context.abilities.num_greedy_logprobs:
        return not_audited(LOGPROBS, "one of the servers reports none")
    own_change, largest, num_tokens = greedy.reread_change, 0.0, 0
    worst: tuple[Row, int] | None = None
    for row in greedy.rows:
        for other in row.repeated:
            own_change = max([own_change, *_changes(row.reference, other)])
        for position, each in enumerate(_changes(row.reference, row.alone)):
            num_tokens += 1
            if each > largest:
                largest, worst = each, (row, position)
    tolerance = max(2e-3, 3 * own_change)
    detail = (
        f"{counted(num_tokens, 'token')}, differing by at most {largest:.2g}; the baseline itself "
        f"varies by {own_change:.2g}"
    )
    if worst is None or largest <= tolerance:
        return passed(LOGPROBS, detail)
    row, position = worst
    scores = [each.answers[0].tokens or () for each in (row.reference, row.alone)]
    fields = {"max_tokens": position + 1, "temperature": 0.0, "logprobs": 1}
    expected, found = (f"{tokens[position].log_p:.5f}" for tokens in scores)
    return failed(LOGPROBS, detail, Case(context.commands(row.prompt, fields), expected, found))


def _changes(reference: Response, other: Response) -> list[float]:
    """Differences of the log-probabilities of tokens, up to the first token that differs."""
    changes = []
    one, two = (each.answers[0].tokens or () for each in (reference, other))
    for a, b in zip(one, two, strict=False):
        if a.text != b.text:
            break
        changes.append(abs(a.log_p - b.log_p))
    return changes
