"""What published rules keep of a drafted token, over the whole vocabulary.

For rules that choose over a batch it is the share of draws in which they keep the token: of what
the other requests drew, and of how the request's own draft goes on, both taken from recorded
drafts.
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
    """Drafts of full length, to put beside a position: what the rest of a batch drew.

    Attributes:
        token_probs: ``[drafts, length]`` q(x).
        estimates: ``[drafts, length]`` P̂(S, A).
        table: P̂.
    """

    def __init__(self, records: Records, length: int) -> None:
        """Take the drafts that have the length."""
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
    """``[vocab]`` how often TETRIS keeps each token at the first position of a draft.

    It takes the tokens of the batch with the largest products of q; those of the request's own
    later positions are smaller than that of the first and take no place before it.
    """
    length = drafts.token_probs.shape[1]
    capacity = verified_per_request(length, 1) * batch_size
    kept = torch.zeros_like(q)
    for _ in range(_NUM_DRAWS):
        others = generator.integers(0, len(drafts.token_probs), batch_size - 1)
        reach = np.sort(np.cumprod(drafts.token_probs[others], axis=1).ravel())[::-1]
        least = reach[capacity - 1] if len(reach) >= capacity else 0.0
        kept += (q >= least).to(q.dtype)
    return kept / _NUM_DRAWS


def keep_of_sv(
    estimates: Floats,
    drafts: RecordedDrafts,
    batch_size: int,
    latency: LatencyModel,
    generator: np.random.Generator,
) -> Floats:
    """How often the published SV keeps a token at the first position of a draft.

    Tokens of the batch are taken in falling order of their products of P̂ while goodput, (requests
    + products)/seconds, is highest.

    Args:
        estimates: ``[n]`` values of P̂ that the token may have.
        drafts: what the others drew, and how the own draft goes on.
        batch_size: requests.
        latency: what passes cost.
        generator: draws the others.

    Returns:
        ``[n]`` shares.
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
            reach = np.sort(np.append(others, own))[::-1]
            tokens = batch_size + np.append(0.0, np.cumsum(reach))
            best = int(np.argmax(tokens / seconds))
            kept[number] += best > 0 and estimate >= reach[best - 1]
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
