"""What a server can do, found out by asking it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwise.audit.answers import Answer
from draftwise.audit.client import Model, at_once
from draftwise.errors import ServerError

_PROBE = "The capital of France is"
_MOST_LOGPROBS = (20, 10, 5, 2)
# Filters that servers apply by default, switched off in the forms that servers take.
_NEUTRAL: tuple[Mapping[str, Any], ...] = (
    {"top_k": 0, "min_p": 0.0},
    {"top_k": -1, "min_p": 0.0},
    {"top_k": 0},
    {"top_k": -1},
    {},
)
# At this temperature several answers are hardly equal by chance.
_HOT = 1.8
_NUM_HOT = 6
# Beyond what rounding changes.
_SAME = 0.3


@dataclass(frozen=True)
class Abilities:
    """What a server can do.

    Attributes:
        num_logprobs: most likely tokens that it reports at each position; 0 for none.
        has_greedy_logprobs: whether those of greedy answers are those at temperature 1.
        has_n: whether a request may have several answers.
        has_top_k: whether it obeys ``top_k``.
        has_penalties: whether it accepts ``presence_penalty`` and ``frequency_penalty``.
        has_bias: whether it accepts ``logit_bias``.
        neutral: fields that switch off the filters that it applies by default.
    """

    num_logprobs: int = 0
    has_greedy_logprobs: bool = False
    has_n: bool = False
    has_top_k: bool = False
    has_penalties: bool = False
    has_bias: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_greedy_logprobs(self) -> int:
        """Most likely tokens whose margins are known in greedy answers; 0 for none."""
        return self.num_logprobs if self.has_greedy_logprobs else 0

    def scores(self) -> dict[str, Any]:
        """The field of a greedy request that asks for margins, if they are known."""
        return {"logprobs": self.num_greedy_logprobs} if self.num_greedy_logprobs else {}

    def missing(self) -> list[str]:
        """What it cannot do, in words."""
        named = {
            "log-probabilities": self.num_logprobs,
            "log-probabilities of greedy answers": self.has_greedy_logprobs
            or not self.num_logprobs,
            "n": self.has_n,
            "top_k": self.has_top_k,
            "penalties": self.has_penalties,
            "logit_bias": self.has_bias,
        }
        return [name for name, has in named.items() if not has]


def abilities_of(model: Model) -> Abilities:
    """Ask a server what it can do.

    Raises:
        ServerError: it does not even answer a plain request.
        SpentError: the limit of the audit is reached.
    """
    neutral = next((each for each in _NEUTRAL[:-1] if _takes(model, **each)), {})
    if not neutral:
        model.ask(_PROBE, max_tokens=1)
    listed = _listed_tokens(model)
    bias = {"1": -1.0}
    return Abilities(
        num_logprobs=listed,
        has_greedy_logprobs=listed > 0 and _has_greedy_logprobs(model, listed),
        has_n=len(_answers(model, n=2)) == 2,
        has_top_k="top_k" in neutral and _obeys_top_k(model),
        has_penalties=_takes(model, presence_penalty=0.5, frequency_penalty=0.5),
        has_bias=_takes(model, logit_bias=bias),
        neutral=neutral,
    )


def common(ours: Abilities, theirs: Abilities) -> Abilities:
    """What the audited server and the baseline can both do; the rest is the baseline's."""
    return Abilities(
        num_logprobs=theirs.num_logprobs,
        has_greedy_logprobs=theirs.has_greedy_logprobs,
        has_n=ours.has_n and theirs.has_n,
        has_top_k=ours.has_top_k and theirs.has_top_k,
        has_penalties=ours.has_penalties and theirs.has_penalties,
        has_bias=ours.has_bias and theirs.has_bias,
        neutral=theirs.neutral,
    )


def draw(
    model: Model, prompt: str, count: int, abilities: Abilities, fields: Mapping[str, Any]
) -> list[Answer]:
    """Several sampled answers to a prompt.

    Args:
        model: what answers.
        prompt: the prompt.
        count: number of answers.
        abilities: those of the model.
        fields: fields of the request, beside those that switch filters off.

    Raises:
        ServerError: the request is refused.
        SpentError: the limit of the audit is reached.
    """
    body = {**abilities.neutral, **fields}
    if abilities.has_n:
        return list(model.ask(prompt, n=count, **body).answers)
    responses = at_once(lambda _: model.ask(prompt, **body), range(count), count)
    return [response.answers[0] for response in responses]


def _answers(model: Model, **fields: Any) -> tuple[Answer, ...]:
    """Short answers with further fields; none if they are refused."""
    try:
        return model.ask(_PROBE, **{"max_tokens": 2, **fields}).answers
    except ServerError as error:
        if error.is_failure and not _is_alive(model):
            raise
        return ()


def _is_alive(model: Model) -> bool:
    """Whether a server answers a plain request, after it failed with another."""
    try:
        model.ask(_PROBE, max_tokens=1)
    except ServerError:
        return False
    return True


def _takes(model: Model, **fields: Any) -> bool:
    return bool(_answers(model, **fields))


def _listed_tokens(model: Model) -> int:
    """Most likely tokens that the server lists, of those numbers that it accepts."""
    for count in _MOST_LOGPROBS:
        answers = _answers(model, logprobs=count, temperature=0.0)
        if answers and answers[0].tokens:
            listed = min(len(token.top) for token in answers[0].tokens)
            return min(count, listed)
    return 0


def _has_greedy_logprobs(model: Model, count: int) -> bool:
    """Whether greedy answers have the log-probabilities of sampled ones."""
    tops = []
    for temperature in (1.0, 0.0):
        answers = _answers(model, logprobs=count, temperature=temperature, max_tokens=1)
        if not answers or not answers[0].tokens:
            return False
        tops.append(answers[0].tokens[0].top)
    best = max(tops[0], key=lambda token: tops[0][token])
    return best in tops[1] and abs(tops[0][best] - tops[1][best]) < _SAME


def _obeys_top_k(model: Model) -> bool:
    """Whether all answers are equal if only the most likely token is kept."""
    hot = {"temperature": _HOT, "top_k": 1, "max_tokens": 6}
    texts = {answer.text for _ in range(_NUM_HOT) for answer in _answers(model, **hot)[:1]}
    return len(texts) == 1
