"""Distributions at and before rejected positions.

Recomputes SVIP's figures of rejections (Zhang et al. 2024, section 3): divergence and entropy at
the rejected position and before it, the sorted probabilities of draft and target, and the entropy
of accepted and rejected positions. The source found that the divergence jumps at the rejected
position, that the draft's entropy is high there, and that its entropy separates accepted from
rejected tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS, look
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Booleans, Floats, Positions
from draftwise.studies.study import SVIP, Data, Description, Finding, Study, too_few_tokens
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OFFSETS = (-4, -3, -2, -1, 0, 1)
_NUM_BINS = 24


def around(positions: Positions, values: Floats, offset: int) -> float:
    """Mean of the values at ``offset`` from rejected positions of the same text, or NaN."""
    at = np.flatnonzero(~positions.accepted)
    moved = at + offset
    inside = (moved >= 0) & (moved < len(positions))
    inside[inside] &= positions.text[moved[inside]] == positions.text[at[inside]]
    return float(values[moved[inside]].mean()) if inside.any() else float("nan")


def chance_of_higher(values: Floats, chosen: Booleans) -> float:
    """Probability that a chosen position has a higher value than another; ties count half.

    This is the area under the ROC curve of the value as a classifier; ½ for an uninformative value.
    """
    both, counts = np.unique(values, return_inverse=True)
    inside = np.bincount(counts[chosen], minlength=len(both)).astype(float)
    outside = np.bincount(counts[~chosen], minlength=len(both)).astype(float)
    if not inside.sum() or not outside.sum():
        return 0.5
    below = np.concatenate([[0.0], np.cumsum(outside)[:-1]])
    return float((inside * (below + outside / 2)).sum() / inside.sum() / outside.sum())


def figures_of(positions: Positions) -> dict[str, Any]:
    """All results for a set of positions.

    Raises:
        InvalidParameterError: no token was rejected, or none accepted.
    """
    accepted = positions.accepted
    if accepted.all() or not accepted.any():
        raise too_few_tokens("accepted and rejected tokens")
    top = float(max(positions.entropy.max(), 1e-6))
    edges = np.linspace(0.0, top, _NUM_BINS + 1)
    finite = np.isfinite(positions.divergence)
    divergence = np.where(finite, positions.divergence, np.nan)

    def histogram(chosen: Booleans) -> list[float]:
        counts, _ = np.histogram(positions.entropy[chosen], edges)
        shares: list[float] = (counts / max(counts.sum(), 1)).tolist()
        return shares

    def of(chosen: Booleans) -> dict[str, Any]:
        return {
            "num_positions": int(chosen.sum()),
            "entropy": float(positions.entropy[chosen].mean()),
            "target_entropy": float(positions.target_entropy[chosen].mean()),
            "divergence": float(np.nanmean(divergence[chosen])),
            "draft_sorted": positions.draft_sorted[chosen].mean(axis=0).tolist(),
            "target_sorted": positions.target_sorted[chosen].mean(axis=0).tolist(),
            "histogram": histogram(chosen),
        }

    filled = np.where(finite, positions.divergence, np.nanmax(divergence))
    return {
        "offsets": list(_OFFSETS),
        "divergence": [around(positions, filled, offset) for offset in _OFFSETS],
        "entropy": [around(positions, positions.entropy, offset) for offset in _OFFSETS],
        "target_entropy": [
            around(positions, positions.target_entropy, offset) for offset in _OFFSETS
        ],
        "entropy_edges": edges.tolist(),
        "accepted": of(accepted),
        "rejected": of(~accepted),
        "chance_of_higher_entropy": chance_of_higher(positions.entropy, ~accepted),
    }


class Rejection(Study):
    """KL divergence and entropy at and before the rejected position."""

    name = "rejection"
    title = "Distributions at rejected positions"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Evaluate all positions of the target's texts."""
        return figures_of(bench.positions())

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw means around a rejection, sorted probabilities, and histograms of entropy."""
        figure, (near, ordered, entropies) = panels(3, width=3.7)
        for number, (key, label) in enumerate(
            (("divergence", "KL(q ‖ p)"), ("entropy", "H(q)"), ("target_entropy", "H(p)"))
        ):
            near.plot(data["offsets"], data[key], label=label, **look(number))
            near.axhline(data["accepted"][key], color=COLOURS[number], linestyle=":", linewidth=1)
        near.set_xlabel("position relative to the rejected one")
        near.set_ylabel("nats (dotted: mean of accepted)")
        near.set_ylim(0, 1.25 * max(max(data[key]) for key in ("divergence", "entropy")))
        near.legend(frameon=False, loc="upper left", ncols=3)
        number = 0
        for key in ("accepted", "rejected"):
            for who in ("draft", "target"):
                values = data[key][f"{who}_sorted"]
                at = range(1, len(values) + 1)
                ordered.plot(at, values, label=f"{who}, {key}", **look(number))
                number += 1
        ordered.set_yscale("log")
        ordered.set_xlabel("rank of the token")
        ordered.set_ylabel("mean probability")
        ordered.legend(frameon=False, fontsize=7)
        edges = data["entropy_edges"]
        for number, (key, style) in enumerate((("accepted", "-"), ("rejected", "--"))):
            entropies.stairs(
                data[key]["histogram"], edges, color=COLOURS[number], linestyle=style, label=key
            )
        entropies.set_xlabel("H(q), nats")
        entropies.set_ylabel("share of positions")
        entropies.legend(frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the distributions at rejected positions."""
        kept, lost = data["accepted"], data["rejected"]
        before = data["divergence"][_OFFSETS.index(-1)]
        at = data["divergence"][_OFFSETS.index(0)]
        unsure = data["entropy"][_OFFSETS.index(0)]
        unsure_before = data["entropy"][_OFFSETS.index(-1)]
        chance = data["chance_of_higher_entropy"]
        text = (
            f"KL(q ‖ p) is {at:.2f} nats at the {lost['num_positions']} rejected positions, "
            f"{before:.2f} one position before, and {kept['divergence']:.2f} at accepted "
            f"positions. The draft's entropy is {unsure:.2f} nats at rejected positions, "
            f"{unsure_before:.2f} one position before, and {kept['entropy']:.2f} at accepted "
            "positions. The probability that a rejected position has a higher entropy than an "
            f"accepted one is {chance:.2f} (0.5 is uninformative). The target's entropy is "
            f"{lost['target_entropy']:.2f} nats at rejected positions and "
            f"{kept['target_entropy']:.2f} at accepted ones."
        )
        return Description(
            text,
            [
                Finding.of(
                    "The divergence of draft and target jumps at the rejected position.",
                    f"{at:.2f} nats against {before:.2f} one position before",
                    [at > before, at > 1.2 * before],
                ),
                Finding.of(
                    "The draft's entropy is high at the rejected position.",
                    f"{unsure:.2f} nats against {unsure_before:.2f} one position before",
                    [unsure > unsure_before, unsure > 1.2 * unsure_before],
                ),
                Finding.of(
                    "Rejected tokens come from distributions of higher entropy than accepted ones.",
                    f"{lost['entropy']:.2f} nats against {kept['entropy']:.2f}; higher in "
                    f"{chance:.0%} of pairs",
                    [lost["entropy"] > kept["entropy"], chance > 0.6],
                ),
                Finding.of(
                    "The draft's sorted probabilities are flatter at rejected positions.",
                    f"the largest is {lost['draft_sorted'][0]:.2f} against "
                    f"{kept['draft_sorted'][0]:.2f} at accepted positions",
                    lost["draft_sorted"][0] < kept["draft_sorted"][0],
                ),
            ],
        )
