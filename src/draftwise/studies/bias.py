"""Bias of published selection rules, measured on real models.

This study goes beyond the sources. A rule that drops a drafted token depending on that token, and
then samples the position from the target, lowers the probability of that token. Every rule is
evaluated over the whole vocabulary at positions of real texts. With k(x) the probability that x is
kept if it is drafted, the output distribution is

    q(x)·k(x)·min(1, p(x)/q(x)) + (mass rejected)·residual(x) + (mass dropped)·p(x).

Its total variation distance from p is the bias at a position. The same rule applied as a filtered
proposal, q′ = q·k, is unbiased. For rules that select over a batch, k is averaged over the drafts
of the other requests and over the rest of the request's own draft, both taken from recorded drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftwise.benchmark.style import COLOURS
from draftwise.studies.drawing import bars, panels, styled
from draftwise.studies.lenience import lenient_output, normalised, total_variation
from draftwise.studies.positions import Floats, Passage
from draftwise.studies.published_rules import Keep, RecordedDrafts, rules
from draftwise.studies.study import OWN, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_POSITIONS = 240
# Differences below this are rounding errors in float64.
_ROUNDING = 1e-6


def published_output(p: Tensor, q: Tensor, keep: Tensor) -> Tensor:
    """Output distribution if dropped positions are sampled from the target as if not drafted.

    Args:
        p: ``[n, vocab]`` the target's distributions.
        q: ``[n, vocab]`` the draft's distributions.
        keep: ``[n, vocab]`` probability that each token is kept if it is drafted.

    Returns:
        ``[n, vocab]`` output distribution of each position.
    """
    accepted = keep * torch.minimum(p, q)
    rejected = (keep * q - accepted).sum(dim=1, keepdim=True)
    dropped = (q * (1 - keep)).sum(dim=1, keepdim=True)
    return accepted + rejected * normalised((p - q).clamp(min=0), p) + dropped * p


def filtered_output(p: Tensor, q: Tensor, keep: Tensor) -> Tensor:
    """Output distribution of the filtered proposal q′ = q·keep; see :func:`published_output`."""
    proposal = q * keep
    accepted = torch.minimum(p, proposal)
    rest = 1 - accepted.sum(dim=1, keepdim=True)
    return accepted + rest * normalised((p - proposal).clamp(min=0), p)


def figures_of(
    passages: Iterable[Passage], keeps: Mapping[str, Keep], num_positions: int, seed: int
) -> dict[str, Any]:
    """Bias of every rule, as published and as a filtered proposal, and of lenience.

    Args:
        passages: positions of whole texts.
        keeps: k(x) of each rule.
        num_positions: number of positions to sample, in total.
        seed: seed of the sampling.
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
        passage.tokens[index],
        passage.p[index],
        passage.q[index],
        None if passage.c is None else passage.c[index],
    )


class Bias(Study):
    """Total variation of each published rule per position."""

    name = "bias"
    title = "How far published rules are from lossless"
    source = OWN
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Evaluate all rules at sampled positions of the target's texts."""
        s = bench.settings
        size = max(s.batch_sizes)
        drafts = RecordedDrafts(bench.collection().records, s.num_speculative_tokens)
        keeps = rules(drafts, max(size, 2), bench.latency, s.seed)
        return {
            "batch_size": size,
            "rules": figures_of(bench.passages(), keeps, _NUM_POSITIONS, s.seed),
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw the mean and the upper decile of each rule."""
        figure, (axes,) = panels(1, width=7.0, height=3.0)
        own = data["rules"]
        bars(axes, list(own), [row["total_variation"] for row in own.values()], digits=4)
        axes.plot(
            [row["upper_decile"] for row in own.values()],
            range(len(own)),
            "D",
            color=COLOURS[1],
            label="90th percentile",
        )
        axes.set_xlabel("total variation from the target's distribution, per position")
        axes.legend(frameon=False, loc="upper right")
        return figure

    def describe(self, data: Data) -> Description:
        """Describe which rules are biased, and by how much."""
        own = data["rules"]
        biased = {n: row for n, row in own.items() if row["total_variation"] > _ROUNDING}
        exact = [name for name in own if name not in biased]
        said = "; ".join(
            f"{name} {row['total_variation']:.4f} (maximum {row['worst']:.4f})"
            for name, row in biased.items()
        )
        filtered = max(row["filtered"] for row in own.values() if row["filtered"] is not None)
        count = next(iter(own.values()))["num_positions"]
        text = (
            f"Mean total variation from the target's distribution at the first drafted position, "
            f"over {count} positions at batch {data['batch_size']}: {said}."
        )
        if exact:
            text += f" Unbiased: {', '.join(exact)}."
        text += (
            f" Applied as filtered proposals, the same rules deviate by {filtered:.0e} at most, "
            "which is rounding."
        )
        svip, sv = own["SVIP: drop where √H(q) > 0.77"], own["SV: greedy over the batch by P̂(S, A)"]
        tetris = own["TETRIS: largest products of q in the batch"]
        return Description(
            text,
            [
                Finding.of(
                    "SV: dropping tokens before verification leaves the distribution unchanged.",
                    f"total variation {sv['total_variation']:.4f} on average, at most "
                    f"{sv['worst']:.4f}, with {sv['dropped']:.0%} of the tokens dropped",
                    sv["total_variation"] < _ROUNDING,
                ),
                Finding.of(
                    "TETRIS: selection over the batch keeps the output's distribution.",
                    f"total variation {tetris['total_variation']:.4f} on average, at most "
                    f"{tetris['worst']:.4f}",
                    tetris["total_variation"] < _ROUNDING,
                ),
                Finding.of(
                    "SVIP: stopping by the draft's entropy is lossless.",
                    f"total variation {svip['total_variation']:.0e}",
                    svip["total_variation"] < _ROUNDING,
                ),
                Finding.of(
                    "Filtered proposals make any of these rules lossless (ours).",
                    f"total variation at most {filtered:.0e}",
                    filtered < _ROUNDING,
                ),
            ],
        )
