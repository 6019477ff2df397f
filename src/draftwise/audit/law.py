"""The exact distribution of the first tokens of an answer, for any setting of the sampling."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftwise.audit.nodes import Node, Nodes, Prefix, is_in_text

# Prefixes that are less likely are not continued.
_RARE = 1e-5
# Share of the whole that may be unknown at a position, and in all.
_UNSURE, _MOST_OTHER = 1e-3, 0.6


@dataclass(frozen=True)
class Sampling:
    """A setting of the sampling.

    Attributes:
        name: how reports call it.
        temperature: divides the logits.
        top_k: number of most likely tokens that are kept; 0 for all.
        top_p: mass of the most likely tokens that are kept.
        presence_penalty: subtracted from the logits of tokens of the answer.
        frequency_penalty: subtracted from them once for each occurrence.
        bias: added to the logits of tokens, by their texts.
        bias_ids: the same, by their ids.
    """

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[str, float] = field(default_factory=dict)
    bias_ids: Mapping[int, float] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The fields of a request with this setting.

        ``top_p`` is always one of them: llama.cpp's server applies 0.95 without it.
        """
        fields: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        if self.top_k:
            fields["top_k"] = self.top_k
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                fields[name] = getattr(self, name)
        if self.bias_ids:
            fields["logit_bias"] = {str(token): bias for token, bias in self.bias_ids.items()}
        return fields


@dataclass(frozen=True)
class Law:
    """Probabilities of the texts of the first tokens.

    Attributes:
        cells: probability of each text.
        other: probability that the answer has another text, or ends before.
    """

    cells: Mapping[str, float]
    other: float

    @property
    def entropy(self) -> float:
        """Entropy in nats, with all other texts as one."""
        p = np.array([*self.cells.values(), self.other])
        p = p[p > 0]
        return float(-(p * np.log(p)).sum())


def law_of(nodes: Nodes, sampling: Sampling, num_tokens: int) -> Law | None:
    """The distribution of the text of the first tokens.

    Tokens of which the text is unclear, prefixes that no answer had, and what lies beyond the known
    tokens are parts of ``other``: its probability is what the texts leave.

    Args:
        nodes: distributions after prefixes.
        sampling: setting of the sampling.
        num_tokens: number of tokens.

    Returns:
        ``None`` if most of the distribution is not known.
    """
    if not nodes.has_words:
        return None
    close = nodes.close
    cells: dict[str, float] = defaultdict(float)

    def expand(prefix: Prefix, mass: float) -> None:
        if len(prefix) == num_tokens:
            cells[nodes.key("".join(prefix))] += mass
            return
        for token, p in _next(nodes, prefix, sampling, close).items():
            if mass * p > _RARE and is_in_text(token):
                expand((*prefix, token), mass * p)

    expand((), 1.0)
    other = max(0.0, 1.0 - sum(cells.values()))
    return Law(dict(cells), other) if other <= _MOST_OTHER else None


def _next(nodes: Nodes, prefix: Prefix, sampling: Sampling, close: float) -> dict[str, float]:
    node = nodes[prefix]
    if node is None:
        return {}
    return next_tokens(node, sampling, Counter(prefix), close) or {}


def next_tokens(
    node: Node, sampling: Sampling, counts: Mapping[str, int], close: float
) -> dict[str, float] | None:
    """Probabilities of the next token under a setting, as far as the tokens are known.

    Logits are the log-probabilities, up to a constant. Bias and penalties come first, then the
    temperature, top-k and top-p, as in :func:`draftwise.core.sampling.probabilities`.

    Args:
        node: the distribution without the setting.
        sampling: the setting.
        counts: how often the answer so far has each token.
        close: a filter that cuts this close to a token may cut on either side of it.

    Returns:
        ``None`` if the unknown tokens could change these probabilities noticeably.
    """
    if not node.tokens:
        return None
    bias = np.array([sampling.bias.get(token, 0.0) for token in node.tokens])
    count = np.array([float(counts.get(token, 0)) for token in node.tokens])
    scores = node.log_p + bias
    scores -= sampling.presence_penalty * (count > 0) + sampling.frequency_penalty * count
    scores /= sampling.temperature
    order = np.argsort(-scores, kind="stable")
    scores, tokens = scores[order], [node.tokens[index] for index in order]
    limit = node.limit / sampling.temperature + _largest_rise(node, sampling)
    if sampling.top_k:
        cut = sampling.top_k
        following = scores[cut] if cut < len(scores) else -math.inf
        if node.tail and (cut > len(scores) or scores[cut - 1] <= limit + close):
            return None
        if cut < len(scores) and scores[cut - 1] - max(following, limit) <= close:
            return None
        scores, tokens, tail = scores[:cut], tokens[:cut], 0.0
    else:
        known = _tail_weight(node, sampling, counts)
        if known is None:
            return None
        tail = known
    weights = np.exp(scores)
    p = weights / (weights.sum() + tail)
    if sampling.top_p < 1:
        before = np.cumsum(p) - p
        if np.abs(before[1:] - sampling.top_p).min(initial=1.0) <= close:
            return None
        if p.sum() < sampling.top_p + close and tail:
            return None
        kept = before < sampling.top_p
        p, tokens = p[kept] / p[kept].sum(), tokens[: int(kept.sum())]
    return dict(zip(tokens, p.tolist(), strict=True))


def _largest_rise(node: Node, sampling: Sampling) -> float:
    """How much the bias may raise the score of a token that is not known."""
    rises = [bias for token, bias in sampling.bias.items() if token not in node.tokens]
    return max([0.0, *rises]) / sampling.temperature


def _tail_weight(node: Node, sampling: Sampling, counts: Mapping[str, int]) -> float | None:
    """Weight of all unknown tokens; ``None`` if it is not known well enough."""
    if not node.tail:
        return 0.0
    known = set(node.tokens)
    moved = {token for token in {*sampling.bias, *counts} if token not in known}
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    num_moved = sum(1 for token in moved if token in sampling.bias or penalised)
    slack = num_moved * math.exp(node.limit + max(0.0, *sampling.bias.values(), 0.0))
    weight = node.tail
    if sampling.temperature < 1:
        # Σ p^(1/T) lies between 0 and Σ p · (largest p)^(1/T − 1).
        largest = weight * math.exp(node.limit * (1 / sampling.temperature - 1))
        weight, slack = largest / 2, slack + largest / 2
    elif sampling.temperature > 1:
        return None
    total = float(np.exp(node.log_p / sampling.temperature).sum()) + weight
    return None if slack > _UNSURE * total else weight
