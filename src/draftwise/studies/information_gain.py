"""Information gain of S and A about acceptance, for all ordered triples of a list of models.

Recomputes SV's information gain (Kim et al. 2025): H(X) and H(X | S, A), where X is whether the
token is accepted, in four binnings (5×5, 10×10, 20×20, adaptive), over combinations of target,
draft and companion. The source found a positive gain in all of its combinations (90 public ones in
its later version), of about a third of the entropy on average, and a larger gain with adaptive bins
than with equal bins.

The plain estimate always increases with finer bins, so the study also reports an estimate corrected
by permutations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Records
from draftwise.studies.drawing import panels, styled
from draftwise.studies.settings import StudySettings
from draftwise.studies.study import SV, Data, Description, Finding, Study, too_few_tokens
from draftwise.studies.workbench import Workbench, same_distribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINNINGS = ("5x5", "10x10", "20x20", "adaptive")


def figures_of_triple(records: Records, target_records: Records) -> dict[str, Any]:
    """All results for one triple.

    Args:
        records: drafted tokens with the companion's S and A.
        target_records: the same tokens with the target in the companion's place.

    Raises:
        InvalidParameterError: all tokens were accepted, or none.
        RuntimeError: the two records have different tokens.
    """
    if not np.array_equal(records.acceptance, target_records.acceptance):
        raise RuntimeError("the two runs drafted differently")
    gains = information_gains(records, "accepted")
    if not gains["H"].entropy:
        raise too_few_tokens("accepted and rejected tokens")
    figures: dict[str, Any] = {
        "num_tokens": len(records),
        "mean_acceptance": float(
            np.average(records.acceptance, weights=records.reach_probability())
        ),
        "entropy": gains["H"].entropy,
        "pearson": pearson(records.overlap, target_records.overlap),
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
    """Ordered triples (target, draft, companion) of distinct models."""
    return [
        (target, draft, companion)
        for target in targets
        for draft, companion in itertools.permutations(small, 2)
        if target not in (draft, companion)
    ]


def triples_of_settings(settings: StudySettings, largest: str) -> list[tuple[str, str, str]]:
    """The triples that are measured.

    These are all triples of ``settings.models`` with the target, and with the largest of them as
    the target. A draft that is not among them, such as a head or an exit of the target, has each of
    them and the companion of the settings as its companion.

    Args:
        settings: settings of the study.
        largest: the largest of ``settings.models``.
    """
    target, draft = same_distribution(settings.target), same_distribution(settings.draft)
    found = triples([target, largest], settings.models)
    if draft not in settings.models:
        companions = [*settings.models, *([settings.companion] if settings.companion else [])]
        found += [(target, draft, each) for each in map(same_distribution, companions)]
    return list(dict.fromkeys(each for each in found if each[0] != each[2]))


class InformationGain(Study):
    """H(X) and H(X | S, A) in all binnings, over triples."""

    name = "information-gain"
    title = "Information gain of S and A about acceptance"
    source = SV
    min_models = 2

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure all triples of the settings."""
        largest = max(bench.settings.models, key=lambda name: _size(bench, name))
        results = []
        for each in triples_of_settings(bench.settings, largest):
            records = bench.collection(each[1], each[2], each[0]).records
            target_records = bench.collection(each[1], each[0], each[0]).records
            names = dict(zip(("target", "draft", "companion"), each, strict=True))
            results.append(names | figures_of_triple(records, target_records))
        return {"triples": results}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw H(X) and H(X | S, A), one row per triple."""
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

    def describe(self, data: Data) -> Description:
        """Describe the information gain over all triples."""
        rows = data["triples"]
        shares = np.array([_gain(row) / row["entropy"] for row in rows])
        gains = [_gain(row) for row in rows]
        finest = sum(
            row["S,A adaptive"]["corrected"] >= row["S,A 20x20"]["corrected"] for row in rows
        )
        free = sum(row["q(x)"]["corrected"] < _gain(row) for row in rows)
        text = (
            f"Over {len(rows)} ordered triples, the information gain of S and A about the "
            f"acceptance of a tested token is {min(gains):.3f} to {max(gains):.3f} bits (adaptive "
            f"bins, corrected), {shares.mean():.0%} of its entropy on average. The gain of q(x), "
            f"which needs no companion, is smaller in {free} of the triples and at least as large "
            f"in {len(rows) - free}."
        )
        return Description(
            text,
            [
                Finding.of(
                    "S and A have a positive information gain in every combination of models.",
                    f"corrected, positive in {sum(g > 0 for g in gains)} of {len(rows)}",
                    all(gain > 0 for gain in gains),
                ),
                Finding.of(
                    "S and A remove about a third of the entropy (34 % on average).",
                    f"{shares.mean():.0%} on average, {shares.min():.0%} to {shares.max():.0%}",
                    bool(0.25 < shares.mean() < 0.45),
                ),
                Finding.of(
                    "Adaptive bins have a larger gain than equal bins.",
                    f"corrected, at least that of 20×20 in {finest} of {len(rows)} triples",
                    [finest > len(rows) / 2, finest == len(rows)],
                ),
                Finding.of(
                    "The draft's own signals have a smaller gain than the companion's.",
                    f"the gain of q(x) alone is smaller in {free} of {len(rows)} triples",
                    [free > 0, free == len(rows)],
                ),
            ],
        )


def _gain(row: Mapping[str, Any]) -> float:
    return float(row["S,A adaptive"]["corrected"])


def short_name(name: str) -> str:
    """A model's name without its path or organisation."""
    return name.rstrip("/").split("/")[-1].removeprefix("zoo:")


def _size(bench: Workbench, name: str) -> int:
    if same_distribution(bench.settings.target) == name:
        return 0
    draft = bench.models(draft=name).draft
    assert draft is not None
    return draft.num_parameters
