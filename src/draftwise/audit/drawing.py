"""Sampled answers of both servers, and the prompts and settings for which they are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwise.audit.abilities import draw
from draftwise.audit.answers import Answer
from draftwise.audit.client import Model, at_once
from draftwise.audit.context import Context
from draftwise.audit.law import Law, Sampling, law_of
from draftwise.audit.nodes import Nodes, is_in_text
from draftwise.audit.rereading import Rereader
from draftwise.audit.speculation import DraftCounter

OTHER = "\0other"
ANSWERS_PER_REQUEST = 16
_NUM_PROMPTS = 3
_NUM_CANDIDATES = 20
_NUM_FIRST, _NUM_FURTHER = 16, 96
# Prefixes of each length that the baseline reads.
_NUM_REREAD = 8
_LENGTHS = (4, 3, 2)
# Beyond the tokens that are compared, so that drafts are as long as they usually are.
_MORE_TOKENS = 6
_MOST_OTHER = 0.25
_PLAIN = Sampling("temperature 1")
_BIAS = -1.5


@dataclass(eq=False)
class Subject:
    """A prompt whose answers are sampled.

    Attributes:
        prompt: the prompt.
        nodes: distributions of the baseline after the prompt.
        num_tokens: number of tokens that are compared.
    """

    prompt: str
    nodes: Nodes
    num_tokens: int = _LENGTHS[-1]


@dataclass
class Draws:
    """Counts of answers to a prompt with a setting, by the text of their first tokens.

    Attributes:
        subject: the prompt.
        sampling: the setting.
        law: exact distribution of the texts; ``None`` if it is not known.
        ours: counts of the audited server.
        theirs: counts of the baseline.
    """

    subject: Subject
    sampling: Sampling
    law: Law | None
    ours: Counter[str] = field(default_factory=Counter)
    theirs: Counter[str] = field(default_factory=Counter)


def choose_subjects(context: Context) -> list[Subject]:
    """Select the prompts whose next tokens have few likely values, and whose answers are drafted.

    Raises:
        ServerError: a request is refused.
        SpentError: the limit of the audit is reached.
    """
    candidates = [Subject(prompt, Nodes()) for prompt in context.prompts[:_NUM_CANDIDATES]]
    if not context.abilities.num_logprobs:
        return _without_laws(context, candidates)
    for candidate in candidates:
        _explore(context, candidate, _NUM_FIRST)
    candidates.sort(key=lambda each: _unsuitability(law_of(each.nodes, _PLAIN, _LENGTHS[-1])))
    drafted = [each for each in candidates[: 3 * _NUM_PROMPTS] if _is_drafted(context, each)]
    chosen = [*drafted, *(each for each in candidates if each not in drafted)][:_NUM_PROMPTS]
    for each in chosen:
        _explore(context, each, _NUM_FURTHER)
        laws = {length: law_of(each.nodes, _PLAIN, length) for length in _LENGTHS}
        each.num_tokens = next(
            (length for length, law in laws.items() if law and law.other <= _MOST_OTHER),
            _LENGTHS[-1],
        )
    _reread(context, chosen)
    return chosen


def draws_of(context: Context, subjects: Sequence[Subject]) -> list[Draws]:
    """All pairs of a prompt and a setting that both servers support, without answers so far."""
    return [
        Draws(subject, sampling, law_of(subject.nodes, sampling, subject.num_tokens))
        for subject in subjects
        for sampling in settings_for(context, subject)
    ]


def settings_for(context: Context, subject: Subject) -> list[Sampling]:
    """Settings of the sampling for a prompt."""
    abilities = context.abilities
    most = min(10, abilities.num_logprobs // 2) if abilities.has_top_k else 0
    suffix = f", top-k {most}" if most else ""
    settings = [
        _PLAIN,
        Sampling(f"temperature 0.7{suffix}", temperature=0.7, top_k=most),
        Sampling("top-p 0.8", top_p=0.8),
    ]
    if abilities.has_top_k:
        settings.append(Sampling("top-k 3", top_k=3))
    if abilities.has_penalties:
        settings.append(
            Sampling(f"penalties{suffix}", top_k=most, presence_penalty=0.6, frequency_penalty=0.5)
        )
    biased = _biased_token(context, subject) if abilities.has_bias else None
    if biased is not None:
        text, token = biased
        settings.append(
            Sampling(f"logit bias{suffix}", top_k=most, bias={text: _BIAS}, bias_ids={token: _BIAS})
        )
    return settings


def draw_round(context: Context, draws: Sequence[Draws], number: int) -> None:
    """Ask both servers for answers to all prompts with all settings.

    Every second round asks for more tokens than are compared, with log-probabilities, which tell
    the tokens. The others ask as clients mostly do. The counts change only if all have answered:
    else quick answers would be more frequent.

    Raises:
        ServerError: a request is refused.
        SpentError: the limit of the audit is reached.
    """
    is_scored = number % 2 == 0
    # Two answers of the audited server for each of the baseline's.
    jobs = [(each, True) for each in draws for _ in range(2)] + [(each, False) for each in draws]

    def work(job: tuple[Draws, bool]) -> list[Answer]:
        each, is_ours = job
        model: Model = context.server if is_ours else context.baseline
        abilities = context.own if is_ours else context.abilities
        fields = {**each.sampling.fields(), "max_tokens": each.subject.num_tokens}
        if is_scored and abilities.num_logprobs:
            fields |= {"logprobs": 1, "max_tokens": each.subject.num_tokens + _MORE_TOKENS}
        return draw(model, each.subject.prompt, ANSWERS_PER_REQUEST, abilities, fields)

    results = at_once(work, jobs, num_threads(context))
    for (each, is_ours), answers in zip(jobs, results, strict=True):
        counts = each.ours if is_ours else each.theirs
        counts.update(outcome(answer, each.subject) for answer in answers)


def num_threads(context: Context) -> int:
    """Requests at once, so that about four times the concurrency of answers is asked for."""
    per_request = ANSWERS_PER_REQUEST
    return max(1, 4 * context.settings.concurrency // per_request)


def outcome(answer: Answer, subject: Subject) -> str:
    """The text of the first tokens of an answer; :data:`OTHER` if they are not all in its text."""
    length, key = subject.num_tokens, subject.nodes.key
    if answer.tokens is not None:
        tokens = [token.text for token in answer.tokens[:length]]
        whole = len(tokens) == length and all(map(is_in_text, tokens))
        return key("".join(tokens)) if whole else OTHER
    return key(answer.text) if answer.finish_reason == "length" else OTHER


def _explore(context: Context, subject: Subject, count: int) -> None:
    """Let the baseline tell its distributions after the prompt, by sampled answers."""
    fields = {
        "temperature": 1.0,
        "max_tokens": _LENGTHS[0],
        "logprobs": context.abilities.num_logprobs,
    }

    def work(number: int) -> list[Answer]:
        del number
        return draw(
            context.baseline, subject.prompt, ANSWERS_PER_REQUEST, context.abilities, fields
        )

    rounds = range(count // ANSWERS_PER_REQUEST)
    for answers in at_once(work, rounds, num_threads(context)):
        subject.nodes.add(answers)


def _reread(context: Context, subjects: Sequence[Subject]) -> None:
    """Let the baseline read the most frequent beginnings of its answers, with prompts in turn."""
    if context.settings.chat:
        return
    reader = Rereader(context.baseline, context.abilities.num_logprobs, 1.0)
    usages = [context.baseline.ask(each.prompt, max_tokens=1).usage for each in subjects]
    for length in range(_LENGTHS[0] - 1, 0, -1):
        for index in range(_NUM_REREAD):
            for each, usage in zip(subjects, usages, strict=True):
                prefixes = each.nodes.most_visited(length, _NUM_REREAD)
                if index < len(prefixes) and all(map(is_in_text, prefixes[index])):
                    prefix = prefixes[index]
                    token = reader.next_token(each.prompt, prefix, usage.get("prompt_tokens"))
                    if token is not None:
                        each.nodes.add_reread(prefix, token)


def _without_laws(context: Context, candidates: list[Subject]) -> list[Subject]:
    """The prompts to which the baseline has a few different answers."""
    fields = {"temperature": 1.0, "max_tokens": _LENGTHS[0]}

    def distance(subject: Subject) -> int:
        several = draw(
            context.baseline, subject.prompt, ANSWERS_PER_REQUEST, context.abilities, fields
        )
        return abs(len({answer.text for answer in several}) - ANSWERS_PER_REQUEST // 2)

    for each in candidates:
        each.num_tokens = _LENGTHS[0]
    return sorted(candidates, key=distance)[:_NUM_PROMPTS]


def _unsuitability(law: Law | None) -> float:
    """How little a prompt shows: much outside the known texts, or one likely text, or many."""
    if law is None:
        return float("inf")
    return law.other + max(0.0, 0.7 - law.entropy) + 0.2 * max(0.0, law.entropy - 2.5)


def _is_drafted(context: Context, subject: Subject) -> bool:
    """Whether the audited server drafts tokens for a prompt; True if it does not say."""
    counter = DraftCounter(context.server)
    fields = {"temperature": 1.0, "max_tokens": _LENGTHS[0] + _MORE_TOKENS}
    draw(context.server, subject.prompt, ANSWERS_PER_REQUEST // 2, context.own, fields)
    counts = counter.count()
    return counts is None or counts[0] > 0


def _biased_token(context: Context, subject: Subject) -> tuple[str, int] | None:
    """The most likely first token and its id; ``None`` if the id cannot be found out."""
    root = subject.nodes[()]
    if root is None or not root.tokens or not is_in_text(root.tokens[0]):
        return None
    text = root.tokens[0]
    before = context.server.token_ids(subject.prompt)
    after = context.server.token_ids(subject.prompt + text)
    if before is None or after is None or after[:-1] != before:
        return None
    return text, after[-1]
