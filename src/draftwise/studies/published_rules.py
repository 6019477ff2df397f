"""Probability k(x) that published selection rules keep a drafted token, over the whole vocabulary.

For rules that select over a batch, k(x) is a Monte Carlo estimate. It averages over the drafts of
the other requests and over the rest of the request's own draft, both sampled from recorded drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.core.signals import agreement, entropy, overlap
from draftwise.estimators.records import Records
from draftwise.estimators.tables import AcceptanceTable
from draftwise.policies.tetris import verified_per_request
from draftwise.studies.positions import Floats, Passage

Keep = Callable[[Passage], Tensor]

_NUM_DRAWS = 24
_CONTEXT = 150


class RecordedDrafts:
    """Recorded drafts of full length, which stand for the other requests of a batch.

    Attributes:
        token_probs: ``[drafts, length]`` q(x).
        estimates: ``[drafts, length]`` P̂(S, A).
        table: the fitted P̂.
    """

    def __init__(self, records: Records, length: int) -> None:
        """Select the drafts with at least ``length`` tokens."""
        self.table = AcceptanceTable.fit(records, "adaptive")
        estimates = self.table.predict(
            torch.from_numpy(records.overlap), torch.from_numpy(records.agreement)
        ).numpy()
        starts = np.flatnonzero(records.position == 0)
        ends = np.append(starts[1:], len(records))
        whole = starts[ends - starts >= length]
        rows = whole[:, None] + np.arange(length)
        self.token_probs: Floats = records.token_prob[rows].astype(np.float64)
        self.estimates: Floats = estimates[rows].astype(np.float64)


def keep_of_tetris(
    q: Tensor, drafts: RecordedDrafts, batch_size: int, generator: np.random.Generator
) -> Tensor:
    """``[vocab]`` fraction of draws in which TETRIS keeps each token at a draft's first position.

    TETRIS keeps the tokens of the batch with the largest products of q. The products at later
    positions of the same draft are not larger than that at the first, so they are left out.
    """
    length = drafts.token_probs.shape[1]
    capacity = verified_per_request(length, 1) * batch_size
    kept = torch.zeros_like(q)
    for _ in range(_NUM_DRAWS):
        others = generator.integers(0, len(drafts.token_probs), batch_size - 1)
        prefix_acceptance_prob = np.sort(np.cumprod(drafts.token_probs[others], axis=1).ravel())[
            ::-1
        ]
        least = (
            prefix_acceptance_prob[capacity - 1] if len(prefix_acceptance_prob) >= capacity else 0.0
        )
        kept += (q >= least).to(q.dtype)
    return kept / _NUM_DRAWS


def keep_of_sv(
    estimates: Floats,
    drafts: RecordedDrafts,
    batch_size: int,
    latency: LatencyModel,
    generator: np.random.Generator,
) -> Floats:
    """Fraction of draws in which the published SV keeps a token at a draft's first position.

    SV sorts the tokens of the batch by their products of P̂, descending. It keeps as many of them
    as maximise goodput, (requests + sum of products) / seconds.

    Args:
        estimates: ``[n]`` possible values of P̂ of the token.
        drafts: recorded drafts for the other requests and for the rest of the own draft.
        batch_size: number of requests.
        latency: latency model.
        generator: random generator of the draws.

    Returns:
        ``[n]`` fractions.
    """
    length = drafts.estimates.shape[1]
    sizes = batch_size + np.arange(batch_size * length + 1)
    seconds = np.array([latency.target_seconds(n, batch_size * _CONTEXT) for n in sizes])
    kept = np.zeros(len(estimates))
    for _ in range(_NUM_DRAWS):
        rows = generator.integers(0, len(drafts.estimates), batch_size)
        others = np.cumprod(drafts.estimates[rows[1:]], axis=1).ravel()
        following = np.cumprod(np.append(1.0, drafts.estimates[rows[0], 1:]))
        for number, estimate in enumerate(estimates):
            own = estimate * following
            prefix_acceptance_prob = np.sort(np.append(others, own))[::-1]
            tokens = batch_size + np.append(0.0, np.cumsum(prefix_acceptance_prob))
            best = int(np.argmax(tokens / seconds))
            kept[number] += best > 0 and estimate >= prefix_acceptance_prob[best - 1]
    return kept / _NUM_DRAWS


def rules(
    drafts: RecordedDrafts, batch_size: int, latency: LatencyModel, seed: int
) -> Mapping[str, Keep]:
    """k(x) of each rule, ``[n, vocab]`` float64."""
    generator = np.random.default_rng(seed)

    def of_companion(passage: Passage) -> Tensor:
        assert passage.c is not None
        return (agreement(passage.q, passage.c) >= 0.5).double()

    def of_sv(passage: Passage) -> Tensor:
        assert passage.c is not None
        s = overlap(passage.q, passage.c).unsqueeze(1)
        a = agreement(passage.q, passage.c)
        estimates = drafts.table.predict(s.expand_as(a), a).double()
        keep = torch.zeros_like(estimates)
        for row in range(len(estimates)):
            values, index = np.unique(estimates[row].numpy(), return_inverse=True)
            shares = keep_of_sv(values, drafts, batch_size, latency, generator)
            keep[row] = torch.from_numpy(shares[index])
        return keep

    def of_tetris(passage: Passage) -> Tensor:
        q = passage.q.double()
        rows = [keep_of_tetris(row, drafts, batch_size, generator) for row in q]
        return torch.stack(rows)

    return {
        "SV: greedy over the batch by P̂(S, A)": of_sv,
        "TETRIS: largest products of q in the batch": of_tetris,
        "companion: drop x if A(x) < 0.5": of_companion,
        "confidence: drop x if q(x) < 0.4": lambda passage: (passage.q >= 0.4).double(),
        "SVIP: drop where √H(q) > 0.77": lambda passage: (
            (entropy(passage.q).clamp(min=0).sqrt() <= 0.77).double().unsqueeze(1)
        ).expand(passage.q.shape),
    }
