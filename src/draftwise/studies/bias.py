"""How far each published rule is from lossless, on real models.

Beyond the sources. A rule that drops a drafted token by looking at it, and leaves the position to
the target, makes that token rarer than it should be. Here every rule is evaluated over the whole
vocabulary at positions of real texts: k(x) is the probability that x is kept if it is drawn, and
the output is

    q(x)·k(x)·min(1, p(x)/q(x)) + (mass rejected)·residual(x) + (mass dropped)·p(x).

Its total variation from p is the bias of a position. The same rule as a filtered proposal, q′ =
q·k, has none. For rules that choose over a batch, k is averaged over what the other requests drew
and over the rest of the request's own draft, both taken from recorded drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from draftwise.benchmark.style import COLOURS
from draftwise.core.latency import LatencyModel
from draftwise.core.signals import agreement, entropy, overlap
from draftwise.estimators.records import Records
from draftwise.estimators.tables import AcceptanceTable
from draftwise.policies.tetris import verified_per_request
from draftwise.studies.drawing import bars, panels, styled
from draftwise.studies.lenience import lenient_output, normalised, total_variation
from draftwise.studies.positions import Floats, Passage
from draftwise.studies.study import OWN, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

Keep = Callable[[Passage], Tensor]

_NUM_POSITIONS = 240
_NUM_DRAWS = 24
_CONTEXT = 150
# What rounding in float64 leaves.
_NOTHING = 1e-6


def published_output(p: Tensor, q: Tensor, keep: Tensor) -> Tensor:
    """What comes out if dropped positions are left to the target as if nothing was proposed.

    Args:
        p: ``[n, vocab]`` the target's distributions.
        q: ``[n, vocab]`` the draft's.
        keep: ``[n, vocab]`` probability that each token is kept if it is drawn.

    Returns:
        ``[n, vocab]`` distribution of the position.
    """
    accepted = keep * torch.minimum(p, q)
    rejected = (keep * q - accepted).sum(dim=1, keepdim=True)
    dropped = (q * (1 - keep)).sum(dim=1, keepdim=True)
    return accepted + rejected * normalised((p - q).clamp(min=0), p) + dropped * p


def filtered_output(p: Tensor, q: Tensor, keep: Tensor) -> Tensor:
    """What comes out of the filtered proposal q′ = q·keep; see :func:`published_output`."""
    proposal = q * keep
    accepted = torch.minimum(p, proposal)
    rest = 1 - accepted.sum(dim=1, keepdim=True)
    return accepted + rest * normalised((p - proposal).clamp(min=0), p)


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


def figures_of(
    passages: Iterable[Passage], keeps: Mapping[str, Keep], num_positions: int, seed: int
) -> dict[str, Any]:
    """Bias of every rule, published and filtered, and of lenience.

    Args:
        passages: whole texts.
        keeps: the rules.
        num_positions: of each passage's share, drawn.
        seed: of the drawing.
    """
    seen: dict[str, dict[str, list[Floats]]] = {}
    generator = np.random.default_rng(seed)
    everything = list(passages)
    total = sum(len(passage.text) for passage in everything)
    for passage in everything:
        share = max(1, round(num_positions * len(passage.text) / total))
        chosen = np.sort(generator.permutation(len(passage.text))[:share])
        part = _some(passage, chosen)
        p, q = part.p.double(), part.q.double()
        p, q = normalised(p, p), normalised(q, q)
        for name, rule in keeps.items():
            keep = rule(part)
            own = seen.setdefault(name, {"published": [], "filtered": [], "dropped": []})
            own["published"].append(total_variation(published_output(p, q, keep), p).numpy())
            own["filtered"].append(total_variation(filtered_output(p, q, keep), p).numpy())
            own["dropped"].append((q * (1 - keep)).sum(dim=1).numpy())
        for lenience in (0.8, 0.5):
            own = seen.setdefault(f"lenience {lenience}", {"published": []})
            own["published"].append(total_variation(lenient_output(p, q, lenience)[0], p).numpy())
    figures = {}
    for name, columns in seen.items():
        values = np.concatenate(columns["published"])
        figures[name] = {
            "num_positions": len(values),
            "total_variation": float(values.mean()),
            "upper_decile": float(np.quantile(values, 0.9)),
            "worst": float(values.max()),
            "filtered": float(np.concatenate(columns["filtered"]).max())
            if "filtered" in columns
            else None,
            "dropped": float(np.concatenate(columns["dropped"]).mean())
            if "dropped" in columns
            else None,
        }
    return figures


def _some(passage: Passage, chosen: Any) -> Passage:
    index = torch.from_numpy(chosen)
    return Passage(
        passage.text[chosen],
        passage.index[chosen],
        passage.context[chosen],
        passage.tokens[index],
        passage.p[index],
        passage.q[index],
        None if passage.c is None else passage.c[index],
        passage.greedy,
    )


class Bias(Study):
    """Total variation of each published rule per position."""

    name = "bias"
    title = "How far published rules are from lossless"
    source = OWN

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """On positions of the target's texts."""
        s = bench.settings
        size = max(s.batch_sizes)
        drafts = RecordedDrafts(bench.records(), s.num_speculative_tokens)
        keeps = rules(drafts, max(size, 2), bench.latency, s.seed)
        return {
            "batch_size": size,
            "rules": figures_of(bench.passages(), keeps, _NUM_POSITIONS, s.seed),
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Mean and upper decile of each rule."""
        figure, (axes,) = panels(1, width=7.0, height=3.0)
        own = data["rules"]
        bars(axes, list(own), [row["total_variation"] for row in own.values()], digits=4)
        axes.plot(
            [row["upper_decile"] for row in own.values()],
            range(len(own)),
            "D",
            color=COLOURS[1],
            label="a tenth of the positions is beyond",
        )
        axes.set_xlabel("total variation from the target's distribution, per position")
        axes.legend(frameon=False, loc="upper right")
        return figure

    def tell(self, data: Data) -> Account:
        """Which are biased, and by how much."""
        own = data["rules"]
        biased = {n: row for n, row in own.items() if row["total_variation"] > _NOTHING}
        exact = [name for name in own if name not in biased]
        said = "; ".join(
            f"{name} {row['total_variation']:.4f} ({row['worst']:.4f} at worst)"
            for name, row in biased.items()
        )
        filtered = max(row["filtered"] for row in own.values() if row["filtered"] is not None)
        count = next(iter(own.values()))["num_positions"]
        text = (
            f"Mean total variation from the target's distribution at the first drafted position, "
            f"over {count} positions, batch {data['batch_size']}: {said}."
        )
        if exact:
            text += f" Exact: {', '.join(exact)}, which does not look at the token it drops."
        text += (
            f" The same rules as filtered proposals are off by {filtered:.0e} at most: rounding."
        )
        svip, sv = own["SVIP: drop where √H(q) > 0.77"], own["SV: greedy over the batch by P̂(S, A)"]
        tetris = own["TETRIS: largest products of q in the batch"]
        return Account(
            text,
            [
                Finding.of(
                    "SV: dropping tokens before verification leaves the distribution unchanged.",
                    f"total variation {sv['total_variation']:.4f} on average, {sv['worst']:.4f} at "
                    f"worst, with {sv['dropped']:.0%} of the tokens dropped",
                    sv["total_variation"] < _NOTHING,
                ),
                Finding.of(
                    "TETRIS: selection over the batch keeps the output's distribution.",
                    f"total variation {tetris['total_variation']:.4f} on average, "
                    f"{tetris['worst']:.4f} at worst",
                    tetris["total_variation"] < _NOTHING,
                ),
                Finding.of(
                    "SVIP: stopping by the draft's entropy is lossless.",
                    f"total variation {svip['total_variation']:.0e}",
                    svip["total_variation"] < _NOTHING,
                ),
                Finding.of(
                    "Filtered proposals make any of these rules lossless (ours).",
                    f"total variation {filtered:.0e} at most",
                    filtered < _NOTHING,
                ),
            ],
        )
