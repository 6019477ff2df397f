"""Repetition in greedy texts and its effect on acceptance.

Recomputes SVIP's remark on greedy decoding (Zhang et al. 2024). Long greedy texts become
repetitive, and any draft predicts repetition, which inflates the measured acceptance. The source
found that acceptance and draft lengths rise along greedy texts for that reason, and less so along
sampled texts.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import look
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Positions
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_BINS = 8


def figures_of(positions: Positions) -> dict[str, Any]:
    """Acceptance and repetition as functions of the position in the texts."""
    edges = np.unique(np.linspace(0, positions.index.max() + 1, _NUM_BINS + 1).astype(int))
    along = []
    for low, high in itertools.pairwise(edges):
        here = (positions.index >= low) & (positions.index < high)
        if here.any():
            along.append(
                {
                    "from": int(low),
                    "to": int(high),
                    "num_positions": int(here.sum()),
                    "acceptance": float(positions.p_kept[here].mean()),
                    "repeated": float(positions.repeated[here].mean()),
                    "entropy": float(positions.entropy[here].mean()),
                }
            )
    old = positions.repeated
    return {
        "num_positions": len(positions),
        "acceptance": float(positions.p_kept.mean()),
        "repeated": float(old.mean()),
        "acceptance_repeated": float(positions.p_kept[old].mean()) if old.any() else None,
        "acceptance_new": float(positions.p_kept[~old].mean()) if not old.all() else None,
        "along": along,
    }


class Repetition(Study):
    """Acceptance and repetition along greedy and sampled texts."""

    name = "repetition"
    title = "Repetition in greedy texts"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Evaluate long texts, greedy and sampled."""
        length = bench.settings.long_text
        return {
            "greedy": figures_of(bench.positions(temperature=0.0, max_tokens=length)),
            "sampled": figures_of(bench.positions(max_tokens=length)),
            "temperature": bench.settings.temperature,
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw acceptance and repetition along the texts."""
        figure, axes = panels(2)
        for panel, key, label in zip(
            axes,
            ("acceptance", "repeated"),
            ("fraction of positions accepted", "fraction of repeated 4-grams"),
            strict=True,
        ):
            for number, name in enumerate(("greedy", "sampled")):
                along = data[name]["along"]
                middle = [(each["from"] + each["to"]) / 2 for each in along]
                panel.plot(middle, [each[key] for each in along], label=name, **look(number))
            panel.set_xlabel("tokens generated before")
            panel.set_ylabel(label)
            panel.set_ylim(0, 1)
            panel.legend(frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the repetition, and whether it inflates acceptance."""
        greedy, sampled = data["greedy"], data["sampled"]
        first, last = greedy["along"][0], greedy["along"][-1]
        text = (
            f"In greedy texts, {greedy['repeated']:.0%} of the positions end a 4-gram that "
            f"occurred before. In sampled texts (temperature {data['temperature']:g}) it is "
            f"{sampled['repeated']:.0%}. "
        )
        rises = last["acceptance"] > first["acceptance"] + 0.05
        findings = [
            Finding.of(
                "Greedy texts are more repetitive than sampled texts.",
                f"{greedy['repeated']:.0%} repeated against {sampled['repeated']:.0%}; "
                f"{last['repeated']:.0%} at the end of greedy texts",
                greedy["repeated"] > 2 * sampled["repeated"],
            ),
            Finding.of(
                "Acceptance rises along greedy texts.",
                f"from {first['acceptance']:.2f} at the beginning to {last['acceptance']:.2f} at "
                "the end",
                rises,
            ),
        ]
        if greedy["acceptance_repeated"] is not None and greedy["acceptance_new"] is not None:
            again, new = greedy["acceptance_repeated"], greedy["acceptance_new"]
            text += (
                f"The acceptance of greedy texts is {greedy['acceptance']:.2f}: {again:.2f} at "
                f"repeated positions and {new:.2f} elsewhere. The acceptance of sampled texts is "
                f"{sampled['acceptance']:.2f}."
            )
            findings.append(
                Finding.of(
                    "Repetition inflates the acceptance, as any draft predicts it.",
                    f"{again:.2f} at repeated positions, {new:.2f} elsewhere",
                    again > new + 0.05,
                )
            )
        return Description(text, findings)
