"""Exact distributions, and a statistical test of whether samples come from them.

A :class:`Tree` is the mock of a language model here: a distribution for every prefix, over a
vocabulary small enough that every continuation can be counted. A prefix is numbered by reading its
tokens as digits in base ``vocab``, the first token first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

MIN_EXPECTED_COUNT = 10.0


def chi_square_p_value(
    counts: Tensor | npt.NDArray[np.generic] | Sequence[int],
    probabilities: Tensor | npt.NDArray[np.generic] | Sequence[float],
) -> float:
    """The p-value of counts under a distribution.

    Pearson's test; cells with an expected count below :data:`MIN_EXPECTED_COUNT` are pooled.

    Args:
        counts: ``[cells]`` how often each outcome was seen.
        probabilities: ``[cells]`` the distribution, summing to 1.

    Returns:
        The p-value: 0 if an impossible outcome was seen, 1 if only one outcome is possible.
    """
    observed = np.asarray(counts, dtype=np.float64)
    distribution = np.asarray(probabilities, dtype=np.float64)
    if observed.shape != distribution.shape or observed.ndim != 1:
        raise ValueError(f"shapes differ: {observed.shape} and {distribution.shape}")
    if (distribution < 0).any() or abs(distribution.sum() - 1) > 1e-6:
        raise ValueError("the expected distribution is none")
    if observed[distribution == 0].any():
        return 0.0
    expected = distribution * (observed.sum() / distribution.sum())
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    # The rarest cells are pooled, with further cells until the pool is common enough.
    rare = int(np.searchsorted(expected, MIN_EXPECTED_COUNT))
    while 0 < rare < len(expected) and expected[:rare].sum() < MIN_EXPECTED_COUNT:
        rare += 1
    if rare > 1:
        observed = np.concatenate([[observed[:rare].sum()], observed[rare:]])
        expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    if len(expected) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def total_variation(p: Tensor, q: Tensor) -> float:
    """Half the L1 distance of two distributions of the same shape."""
    return float((p.double() - q.double()).abs().sum() / 2)


def prefix_codes(tokens: Tensor, vocab: int) -> Tensor:
    """``[..., length + 1]`` the number of every prefix of ``tokens`` (``[..., length]``)."""
    codes = torch.zeros(*tokens.shape[:-1], tokens.shape[-1] + 1, dtype=torch.int64)
    for i in range(tokens.shape[-1]):
        codes[..., i + 1] = codes[..., i] * vocab + tokens[..., i]
    return codes


def sequence_counts(tokens: Tensor, vocab: int) -> Tensor:
    """``[vocab ** length]`` count of each sequence among ``tokens`` (``[n, length]``)."""
    codes = prefix_codes(tokens, vocab)[:, -1]
    return torch.bincount(codes, minlength=vocab ** tokens.shape[1])


@dataclass(frozen=True)
class Tree:
    """A distribution over token sequences that depends on every earlier token.

    Attributes:
        conditionals: one ``[vocab ** i, vocab]`` float64 table for each position i.
    """

    conditionals: tuple[Tensor, ...]

    @property
    def vocab(self) -> int:
        return self.conditionals[0].shape[1]

    @property
    def depth(self) -> int:
        return len(self.conditionals)

    def joint(self, depth: int | None = None) -> Tensor:
        """``[vocab ** depth]`` probability of every sequence (of the whole depth by default)."""
        mass = torch.ones(1, dtype=torch.float64)
        for table in self.conditionals[:depth]:
            mass = (mass.unsqueeze(1) * table).flatten()
        return mass

    def along(self, tokens: Tensor) -> Tensor:
        """``[n, length + 1, vocab]`` the distributions along the path of ``tokens``.

        Positions beyond the tree's depth hold zeros.
        """
        codes = prefix_codes(tokens, self.vocab)
        met = torch.zeros(*codes.shape, self.vocab, dtype=torch.float64)
        for i in range(min(codes.shape[1], self.depth)):
            met[:, i] = self.conditionals[i][codes[:, i]]
        return met

    def complete(self, tokens: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """``[n, depth]`` the first ``lengths`` tokens as given, the others drawn from the tree."""
        out = torch.zeros(tokens.shape[0], self.depth, dtype=torch.int64)
        code = torch.zeros(tokens.shape[0], dtype=torch.int64)
        for i in range(self.depth):
            drawn = torch.multinomial(self.conditionals[i][code], 1, generator=generator)[:, 0]
            given = tokens[:, min(i, tokens.shape[1] - 1)]
            out[:, i] = torch.where(i < lengths, given, drawn)
            code = code * self.vocab + out[:, i]
        return out


def random_tree(
    vocab: int, depth: int, generator: torch.Generator, sharpness: float = 1.0, p_zero: float = 0.0
) -> Tree:
    """A random :class:`Tree`: softmax of normal logits, with some impossible tokens per prefix.

    Args:
        vocab: number of tokens.
        depth: number of positions.
        generator: source of randomness.
        sharpness: standard deviation of the logits.
        p_zero: how often a token has probability 0 (one token of each prefix never has).
    """
    tables = []
    for i in range(depth):
        shape = (vocab**i, vocab)
        logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        impossible = torch.rand(shape, generator=generator) < p_zero
        impossible.scatter_(1, logits.argmax(dim=1, keepdim=True), False)
        tables.append(logits.masked_fill(impossible, float("-inf")).softmax(dim=1))
    return Tree(tuple(tables))


def integer_tree(vocab: int, depth: int, generator: torch.Generator, largest: int = 3) -> Tree:
    """A :class:`Tree` of small fractions with many zeros, ties and one-hot rows."""
    tables = []
    for i in range(depth):
        weights = torch.randint(0, largest + 1, (vocab**i, vocab), generator=generator).double()
        weights[weights.sum(dim=1) == 0, 0] = 1.0
        tables.append(weights / weights.sum(dim=1, keepdim=True))
    return Tree(tuple(tables))
