"""What S and A tell of acceptance, for all ordered triples of a list of models.

Recomputes SV's information gain (Kim et al. 2025): H(X) and H(X | S, A) for X = the token was kept,
in four binnings (5×5, 10×10, 20×20, adaptive), over combinations of target, draft and companion.
The source found a positive gain in every one of its combinations (90 public ones in its later
version), about a third of the uncertainty on average, and the adaptive binning ahead of the equal
ones.

Beside the plain estimate, which finer bins always raise, stands the one corrected by permutations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Records
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench, same_distribution

BINNINGS = ("5x5", "10x10", "20x20", "adaptive")
SINGLE = ("H", "q(x)", "history", "S", "A")


def figures_of_triple(records: Records, told: Records) -> dict[str, Any]:
    """All figures of one triple.

    Args:
        records: drafted tokens, judged by the companion.
        told: the same tokens, judged by the target in the companion's place.

    Raises:
        RuntimeError: they are not the same tokens.
    """
    if not np.array_equal(records.acceptance, told.acceptance):
        raise RuntimeError("the two runs drafted differently")
    gains = information_gains(records, "accepted")
    figures: dict[str, Any] = {
        "num_tokens": len(records),
        "mean_acceptance": float(np.average(records.acceptance, weights=records.reached())),
        "entropy": gains["H"].entropy,
        "pearson": pearson(records.overlap, told.overlap),
    }
    for name, gain in gains.items():
        figures[name] = {
            "conditional_entropy": gain.conditional_entropy,
            "plain": gain.plain,
            "corrected": gain.corrected,
            "num_cells": gain.num_cells,
        }
    return figures


def triples(targets: Sequence[str], small: Sequence[str]) -> list[tuple[str, str, str]]:
    """Ordered (target, draft, companion), none of them twice in one."""
    return [
        (target, draft, companion)
        for target in targets
        for draft, companion in itertools.permutations(small, 2)
        if target not in (draft, companion)
    ]


class InformationGain(Study):
    """H(X) and H(X | S, A) in all binnings, over triples."""

    name = "information-gain"
    title = "What S and A tell of acceptance"
    source = SV
    fewest_models = 2

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """All triples of the target, and of the largest of the models in its place."""
        s = bench.settings
        target = same_distribution(s.target)
        others = sorted(s.models, key=lambda name: -_size(bench, name))
        results = []
        for each in triples([target, *others[:1]], s.models):
            records = bench.collection(each[1], each[2], each[0]).records
            told = bench.collection(each[1], each[0], each[0]).records
            names = dict(zip(("target", "draft", "companion"), each, strict=True))
            results.append(names | figures_of_triple(records, told))
        return {"triples": results}

    @styled
    def draw(self, data: Data) -> Figure:
        """H(X) and what is left of it, a row for each triple."""
        rows = sorted(data["triples"], key=lambda each: -_gain(each) / each["entropy"])
        figure, (left, gains) = panels(2, width=4.6, height=0.9 + 0.24 * len(rows), sharey=True)
        at = np.arange(len(rows))
        names = [
            " ← ".join(short_name(r[k]) for k in ("target", "draft", "companion")) for r in rows
        ]
        left.barh(at, [r["entropy"] for r in rows], color="#cccccc", label="H(X)")
        left.barh(
            at,
            [r["entropy"] - _gain(r) for r in rows],
            height=0.45,
            color=COLOURS[0],
            label="H(X | S, A), adaptive, corrected",
        )
        left.set_yticks(at, names)
        left.invert_yaxis()
        left.set_xlabel("bits")
        left.set_title("target ← draft ← companion", loc="left", fontsize=8)
        for number, binning in enumerate(BINNINGS):
            gains.plot(
                [r[f"S,A {binning}"]["corrected"] for r in rows],
                at,
                linestyle="none",
                marker="os^D"[number],
                markersize=4,
                color=COLOURS[number],
                label=binning,
            )
        gains.plot(
            [r["q(x)"]["corrected"] for r in rows], at, "kx", markersize=4, label="q(x) alone"
        )
        gains.axvline(0.0, color="black", linewidth=0.8)
        gains.set_xlabel("information gain, corrected, bits")
        for axes in (left, gains):
            axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        return figure

    def tell(self, data: Data) -> Account:
        """Whether S and A tell something everywhere."""
        rows = data["triples"]
        shares = np.array([_gain(row) / row["entropy"] for row in rows])
        gains = [_gain(row) for row in rows]
        finest = sum(
            row["S,A adaptive"]["corrected"] >= row["S,A 20x20"]["corrected"] for row in rows
        )
        free = sum(row["q(x)"]["corrected"] < _gain(row) for row in rows)
        text = (
            f"In {len(rows)} ordered triples S and A tell {min(gains):.3f} to {max(gains):.3f} "
            f"bits of whether a tested token is kept (adaptive bins, corrected), "
            f"{shares.mean():.0%} of its entropy on average. The draft's own probability of the "
            f"token, which costs nothing, tells less than that in {free} of them and as much or "
            f"more in {len(rows) - free}."
        )
        return Account(
            text,
            [
                Finding.of(
                    "S and A have a positive information gain in every combination of models.",
                    f"corrected, positive in {sum(g > 0 for g in gains)} of {len(rows)}",
                    all(gain > 0 for gain in gains),
                ),
                Finding.of(
                    "They take away about a third of the uncertainty (34 % on average).",
                    f"{shares.mean():.0%} on average, {shares.min():.0%} to {shares.max():.0%}",
                    bool(0.25 < shares.mean() < 0.45),
                ),
                Finding.of(
                    "Adaptive bins tell more than equal ones.",
                    f"corrected, as much as 20×20 or more in {finest} of {len(rows)} triples",
                    [finest > len(rows) / 2, finest == len(rows)],
                ),
                Finding.of(
                    "The draft's own signals tell less than the companion.",
                    f"q(x) alone tells less in {free} of {len(rows)} triples",
                    [free > 0, free == len(rows)],
                ),
            ],
        )


def _gain(row: Mapping[str, Any]) -> float:
    return float(row["S,A adaptive"]["corrected"])


def short_name(name: str) -> str:
    """A model's name without where it lies."""
    return name.rstrip("/").split("/")[-1].removeprefix("zoo:")


def _size(bench: Workbench, name: str) -> int:
    if same_distribution(bench.settings.target) == name:
        return 0
    draft = bench.models(draft=name).draft
    assert draft is not None
    return draft.num_parameters
