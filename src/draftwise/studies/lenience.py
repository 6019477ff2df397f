"""Trade-off between speed and fidelity with lenience.

Recomputes the article's trade of quality for speed (the lenience of Leviathan et al. 2023, appendix
A.5). With the acceptance test min(1, p(x)/(l·q(x))), acceptance and speed increase as l decreases,
and the output distribution deviates from the target's.

Acceptance and the distance to the target are computed exactly at each position. Speed is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftwise.benchmark.style import look
from draftwise.benchmark.sustained import batch_contenders, begin, compete, summary
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Passage
from draftwise.studies.study import LAW, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALUES = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)
_LENGTH = 5


def lenient_output(p: Tensor, q: Tensor, lenience: float) -> tuple[Tensor, Tensor]:
    """Output distribution and acceptance probability of a position with lenience.

    The accepted mass is min(q, p/l). After a rejection the token is drawn from max(p − q, 0), as
    without lenience.

    Args:
        p: ``[n, vocab]`` the target's distributions.
        q: ``[n, vocab]`` the draft's distributions.
        lenience: l, in (0, 1].

    Returns:
        ``[n, vocab]`` output and ``[n]`` acceptance.
    """
    accepted = torch.minimum(q, p / lenience)
    acceptance = accepted.sum(dim=1)
    correction = normalised((p - q).clamp(min=0), p)
    return accepted + (1 - acceptance).clamp(min=0).unsqueeze(1) * correction, acceptance


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """``[n, vocab]`` rows normalised to sum 1; rows of zeros are taken from ``otherwise``."""
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-30), otherwise)


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """½ Σ |a − b|: ``[n, vocab]`` twice to ``[n]``."""
    return (a - b).abs().sum(dim=1) / 2


def divergences(passages: Iterable[Passage]) -> dict[str, dict[str, float]]:
    """Mean acceptance, and mean and maximum distance to the target, for each lenience."""
    sums = {value: np.zeros(3) for value in VALUES}
    count = 0
    for passage in passages:
        p, q = passage.p.double(), passage.q.double()
        count += len(p)
        for value in VALUES:
            output, acceptance = lenient_output(p, q, value)
            distance = total_variation(output, p)
            sums[value] += [float(acceptance.sum()), float(distance.sum()), 0.0]
            sums[value][2] = max(sums[value][2], float(distance.max()))
    return {
        f"{value:g}": {
            "acceptance": total[0] / count,
            "total_variation": total[1] / count,
            "worst": total[2],
        }
        for value, total in sums.items()
    }


class Lenience(Study):
    """Acceptance, speed and divergence as functions of lenience."""

    name = "lenience"
    title = "Lenience: speed against fidelity"
    source = f"the article on speculative decoding, after {LAW}"
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Compute distances on the target's texts, and measure speed in interleaved turns."""
        s = bench.settings
        exact = divergences(bench.passages())
        size = min(s.batch_sizes)
        contenders = bench.contenders(["none"])
        for value in VALUES:
            contenders += batch_contenders(
                bench.timed_llm,
                "fixed",
                bench.speculation(_LENGTH, lenience=value, verification="token"),
                f"{value:g}",
            )
        begin(contenders, bench.prompts, bench.sampling, size)
        bench.status("measuring in interleaved turns")
        compete(contenders, s.rounds, s.turn, s.warm_up_steps, 5)
        rows = summary(contenders)
        for name, own in exact.items():
            for key in ("ratio", "standard_error", "acceptance_rate", "tokens_per_request_step"):
                own[key] = rows[name][key]
        return {"batch_size": size, "length": _LENGTH, "lenience": exact}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw acceptance, speed and distance over lenience."""
        figure, axes = panels(3, width=3.4)
        rows = data["lenience"]
        at = [float(value) for value in rows]
        acceptance, speed, distance = axes
        acceptance.plot(at, [r["acceptance"] for r in rows.values()], **look(0))
        acceptance.set_ylabel("mean acceptance probability")
        acceptance.set_ylim(0, 1.02)
        speed.errorbar(
            at,
            [r["ratio"] for r in rows.values()],
            [r["standard_error"] for r in rows.values()],
            capsize=2,
            **look(1),
        )
        speed.set_ylabel("tokens per second, × target only")
        speed.set_ylim(bottom=0)
        distance.plot(at, [r["total_variation"] for r in rows.values()], **look(2))
        distance.set_ylabel("mean total variation from the target")
        distance.set_ylim(bottom=0)
        for panel in axes:
            panel.set_xlabel("lenience l (1: lossless)")
            panel.set_xlim(1.05, 0.05)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the trade-off."""
        rows = data["lenience"]
        first, half, last = rows["1"], rows["0.5"], rows[f"{VALUES[-1]:g}"]
        text = (
            f"With drafts of {data['length']} tokens at batch {data['batch_size']}, a lenience of "
            f"0.5 raises the acceptance from {first['acceptance']:.2f} to "
            f"{half['acceptance']:.2f} and the speed from {first['ratio']:.2f} to "
            f"{half['ratio']:.2f} times target-only decoding. The mean total variation between "
            f"output and target distribution is then {half['total_variation']:.3f} (maximum "
            f"{half['worst']:.2f}). At a lenience of {VALUES[-1]:g}, acceptance, speed and total "
            f"variation are {last['acceptance']:.2f}, {last['ratio']:.2f} and "
            f"{last['total_variation']:.3f}. At 1 the total variation is "
            f"{first['total_variation']:.0e}, which is rounding."
        )
        values = list(rows.values())

        def rises(key: str) -> bool:
            return bool(np.all(np.diff([row[key] for row in values]) >= -1e-9))

        return Description(
            text,
            [
                Finding.of(
                    "Acceptance increases as lenience decreases.",
                    f"{first['acceptance']:.2f} at 1, {last['acceptance']:.2f} at {VALUES[-1]:g}",
                    rises("acceptance"),
                ),
                Finding.of(
                    "Speed increases as lenience decreases.",
                    f"{first['ratio']:.2f} at 1, {last['ratio']:.2f} at {VALUES[-1]:g}",
                    last["ratio"] > first["ratio"],
                ),
                Finding.of(
                    "The output distribution is no longer the target's.",
                    f"total variation {half['total_variation']:.3f} at 0.5, "
                    f"{last['total_variation']:.3f} at {VALUES[-1]:g}",
                    half["total_variation"] > 0.001 and rises("total_variation"),
                ),
            ],
        )
