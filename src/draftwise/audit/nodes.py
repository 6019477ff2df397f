"""Distributions of a model after prefixes, gathered from log-probabilities of its own answers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draftwise.audit.answers import UNCLEAR, Answer, ScoredToken, without_blanks

Floats = npt.NDArray[np.float64]
Prefix = tuple[str, ...]
# Tokens that the text of an answer may leave out, such as <|im_end|>, </s> and [EOS].
_SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_NO_MASS = 1e-9
_TINY = 1e-300
# Changes of log-probabilities count for tokens that are at least as likely.
_LIKELY = 0.01
# Precision of printed log-probabilities.
_PRECISION = 1e-4


@dataclass(frozen=True)
class Node:
    """The model's distribution of the next token after a prefix, without temperature or filters.

    Attributes:
        tokens: ``[known]`` texts of the most likely tokens, in descending order of probability.
        log_p: ``[known]`` their log-probabilities.
        tail: probability of all other tokens together.
        limit: the log-probability of every other token is at most this; minus infinity for none.
    """

    tokens: tuple[str, ...]
    log_p: Floats
    tail: float
    limit: float


def is_in_text(token: str) -> bool:
    """Whether a token is surely a part of the text of an answer, by what it looks like."""
    return bool(token) and UNCLEAR not in token and _SPECIAL.fullmatch(token) is None


@dataclass
class Nodes:
    """What answers with log-probabilities say of the model's distributions.

    Log-probabilities of several visits are averaged, as rounding may differ between batches.

    Attributes:
        has_texts: whether the texts of tokens, joined, are those of the answers.
        has_words: whether they are so without blanks.
    """

    has_texts: bool = True
    has_words: bool = True
    _reread: dict[Prefix, ScoredToken] = field(default_factory=dict)
    _visits: dict[Prefix, list[ScoredToken]] = field(default_factory=lambda: defaultdict(list))
    _cached: dict[Prefix, Node] = field(default_factory=dict)
    _rounding: dict[int, float] = field(default_factory=dict)

    def add(self, answers: Iterable[Answer]) -> None:
        """Add answers with log-probabilities."""
        self._rounding.clear()
        for answer in answers:
            tokens = [token.text for token in answer.tokens or ()]
            for position, token in enumerate(answer.tokens or ()):
                prefix = tuple(tokens[:position])
                self._visits[prefix].append(token)
                self._cached.pop(prefix, None)
            if all(map(is_in_text, tokens)) and answer.finish_reason == "length":
                joined = "".join(tokens)
                self.has_texts &= joined == answer.text
                self.has_words &= without_blanks(joined) == without_blanks(answer.text)

    def add_reread(self, prefix: Prefix, token: ScoredToken) -> None:
        """Add what follows a prefix if the model reads it in place of generating it."""
        self._rounding.clear()
        self._reread[prefix] = token

    def most_visited(self, num_tokens: int, count: int) -> list[Prefix]:
        """The prefixes of a number of tokens that most answers began with."""
        found = [prefix for prefix in self._visits if len(prefix) == num_tokens]
        return sorted(found, key=lambda prefix: -len(self._visits[prefix]))[:count]

    def __getitem__(self, prefix: Prefix) -> Node | None:
        """The distribution after a prefix; ``None`` if no answer began with it."""
        if prefix not in self._cached:
            visits = self._visits.get(prefix)
            if not visits:
                return None
            self._cached[prefix] = _averaged(visits)
        return self._cached[prefix]

    def key(self, text: str) -> str:
        """A text, without blanks where single tokens do not tell theirs."""
        return text if self.has_texts else without_blanks(text)

    @property
    def close(self) -> float:
        """Differences of log-probabilities or of probabilities that rounding may turn around."""
        num_positions = 1 + max(map(len, self._visits), default=0)
        spread = 3 * math.sqrt(2 * max(map(self._rounding_at, range(num_positions))))
        read = [each for prefix in self._reread for each in self._reread_changes(prefix)]
        largest = max((abs(change) for p, change in read if p > _LIKELY), default=0.0)
        return _PRECISION + max(spread, 2 * largest)

    def rounding(self, num_tokens: int) -> float:
        """How much rounding may change the distribution of the first tokens, as a χ² divergence.

        The sum over the positions of E[Σ p (log p′ − log p)²] for the visits of each prefix, and
        for those prefixes that were read.
        """
        return sum(map(self._rounding_at, range(num_tokens)))

    def _rounding_at(self, position: int) -> float:
        if position not in self._rounding:
            visited = [v for p, v in self._visits.items() if len(p) == position and len(v) > 1]
            total, weights = 0.0, [len(visits) for visits in visited]
            if weights:
                total += float(np.average([_spread(visits) for visits in visited], weights=weights))
            read = [prefix for prefix in self._reread if len(prefix) == position]
            if read:
                total += float(np.mean([self._reread_divergence(prefix) for prefix in read]))
            self._rounding[position] = total
        return self._rounding[position]

    def _reread_divergence(self, prefix: Prefix) -> float:
        return math.fsum(p * change**2 for p, change in self._reread_changes(prefix))

    def _reread_changes(self, prefix: Prefix) -> list[tuple[float, float]]:
        """Probabilities of the next tokens, and what reading adds to their log-probabilities."""
        node, top = self[prefix], self._reread[prefix].top
        if node is None:
            return []
        pairs = zip(node.tokens, map(float, node.log_p), strict=True)
        return [(math.exp(log_p), top[text] - log_p) for text, log_p in pairs if text in top]


def _averaged(visits: list[ScoredToken]) -> Node:
    """The mean distribution of several visits, up to the first token whose text is unclear."""
    common = set.intersection(*(set(visit.top) for visit in visits))
    num_listed = min(len(visit.top) for visit in visits)
    means = {
        text: math.log(max(_TINY, float(np.mean([math.exp(visit.top[text]) for visit in visits]))))
        for text in common
    }
    ordered = sorted(means, key=lambda text: -means[text])
    unclear = next((i for i, text in enumerate(ordered) if UNCLEAR in text), len(ordered))
    known = ordered[:unclear]
    # A sampled token beyond the most likely ones stands beside them.
    if len(common) > 1 and all(_has_extra(visit) for visit in visits):
        known = known[: num_listed - 1]
    log_p = np.array([means[text] for text in known])
    tail = max(0.0, 1.0 - float(np.exp(log_p).sum()))
    if tail <= _NO_MASS:
        return Node(tuple(known), log_p, 0.0, -math.inf)
    smallest = float(log_p[-1]) if len(known) else 0.0
    return Node(tuple(known), log_p, tail, min(smallest, math.log(tail)))


def _has_extra(visit: ScoredToken) -> bool:
    """Whether the token itself may be listed beside the most likely ones: it is the last."""
    return visit.text in visit.top and visit.log_p <= min(visit.top.values())


def _spread(visits: list[ScoredToken]) -> float:
    """E[Σ p (log p′ − log p)²] over visits of a prefix."""
    common = set.intersection(*(set(visit.top) for visit in visits))
    if not common:
        return 0.0
    scores = np.array([[visit.top[text] for text in common] for visit in visits])
    mean = scores.mean(axis=0)
    return float((np.exp(mean) * (scores - mean) ** 2).sum(axis=1).mean())
