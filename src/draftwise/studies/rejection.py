"""What the distributions look like where a token is rejected, and just before.

Recomputes SVIP's pictures of a rejection (Zhang et al. 2024, section 3): divergence and entropy at
the rejected position and before it, the sorted probabilities of draft and target, and the entropy
of accepted against rejected positions. The source found that the divergence jumps at the rejected
position, that the draft is unsure of itself just there, and that its entropy tells accepted from
rejected tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS, look
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Booleans, Floats, Positions
from draftwise.studies.study import SVIP, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

_OFFSETS = (-4, -3, -2, -1, 0, 1)
_NUM_BINS = 24


def around(positions: Positions, values: Floats, offset: int) -> float:
    """Mean of values so many positions behind a rejected one, in the same text; NaN of none."""
    at = np.flatnonzero(~positions.accepted)
    moved = at + offset
    inside = (moved >= 0) & (moved < len(positions))
    inside[inside] &= positions.text[moved[inside]] == positions.text[at[inside]]
    return float(values[moved[inside]].mean()) if inside.any() else float("nan")


def chance_of_higher(values: Floats, chosen: Booleans) -> float:
    """Probability that a chosen one has a higher value than another one; ties count half.

    The area under the curve of a test that chooses by the value; ½ where it tells nothing.
    """
    both, counts = np.unique(values, return_inverse=True)
    inside = np.bincount(counts[chosen], minlength=len(both)).astype(float)
    outside = np.bincount(counts[~chosen], minlength=len(both)).astype(float)
    if not inside.sum() or not outside.sum():
        return 0.5
    below = np.concatenate([[0.0], np.cumsum(outside)[:-1]])
    return float((inside * (below + outside / 2)).sum() / inside.sum() / outside.sum())


def figures_of(positions: Positions) -> dict[str, Any]:
    """All figures of some positions."""
    accepted = positions.accepted
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
    """KL and entropy at and before the rejected position."""

    name = "rejection"
    title = "Where tokens are rejected"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Over the target's texts."""
        return figures_of(bench.positions())

    @styled
    def draw(self, data: Data) -> Figure:
        """Around a rejection; sorted probabilities; entropies."""
        figure, (near, ordered, entropies) = panels(3, width=3.7)
        for number, (key, label) in enumerate(
            (("divergence", "KL(q ‖ p)"), ("entropy", "H(q)"), ("target_entropy", "H(p)"))
        ):
            near.plot(data["offsets"], data[key], label=label, **look(number))
            near.axhline(data["accepted"][key], color=COLOURS[number], linestyle=":", linewidth=1)
        near.set_xlabel("position, the rejected one is 0")
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

    def tell(self, data: Data) -> Account:
        """What marks a rejection."""
        kept, lost = data["accepted"], data["rejected"]
        before = data["divergence"][_OFFSETS.index(-1)]
        at = data["divergence"][_OFFSETS.index(0)]
        unsure = data["entropy"][_OFFSETS.index(0)]
        unsure_before = data["entropy"][_OFFSETS.index(-1)]
        chance = data["chance_of_higher_entropy"]
        text = (
            f"At rejected positions ({lost['num_positions']}) KL(q ‖ p) is {at:.2f} nats, one "
            f"position before {before:.2f}, at accepted ones {kept['divergence']:.2f}. The draft's "
            f"entropy is {unsure:.2f} nats there, {unsure_before:.2f} before and "
            f"{kept['entropy']:.2f} at accepted positions. A rejected position has the higher "
            f"entropy of a pair with probability {chance:.2f} (0.5 would tell nothing). The "
            f"target is less sure there too: {lost['target_entropy']:.2f} nats against "
            f"{kept['target_entropy']:.2f}."
        )
        return Account(
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
                    "The draft's sorted probabilities are flatter where it is rejected.",
                    f"the first is {lost['draft_sorted'][0]:.2f} against "
                    f"{kept['draft_sorted'][0]:.2f}",
                    lost["draft_sorted"][0] < kept["draft_sorted"][0],
                ),
            ],
        )
