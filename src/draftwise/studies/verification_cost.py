"""What verification costs: operations per token, acceptance, the companion's share.

Recomputes SV's cost of verification (Kim et al. 2025): floating-point operations of speculative
decoding (SD) and SV, the share of verified tokens that is accepted, and what the companion adds.
The source found 18 to 45 % fewer operations for verification, about 20 % more acceptance, and a
companion that adds 1 to 5 % of compute.

Operations are counted as two for each parameter and token that passes through a model; of what is
decoded, prompts apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS, HATCHES
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.sustained import Contender, begin, compete
from draftwise.studies.workbench import Workbench

_POLICIES = ("none", "fixed:5", "sv-published:5", "sv:5")
_ROLES = ("target", "draft", "companion")


def operations(totals: Mapping[str, int], parameters: Mapping[str, int]) -> dict[str, float]:
    """Floating-point operations by model, of what was decoded.

    Args:
        totals: of requests: ``steps``, ``drafted``, ``verified``, ``judged``.
        parameters: of each model, by role.
    """
    tokens = {
        "target": totals["steps"] + totals["verified"],
        # The newest token and all drafted but the last are read by the draft.
        "draft": totals["drafted"],
        "companion": totals["judged"],
    }
    return {role: 2.0 * parameters[role] * tokens[role] for role in _ROLES}


def figures_of(contender: Contender, parameters: Mapping[str, int]) -> dict[str, Any]:
    """What one policy spent, per token gained."""
    totals, tokens = contender.counts.totals, contender.counts.tokens
    spent = operations(totals, parameters)
    whole = sum(spent.values())
    wasted = totals["verified"] - totals["accepted"]
    return {
        "tokens": tokens,
        "totals": dict(totals),
        "gflop_per_token": {role: spent[role] / tokens / 1e9 for role in _ROLES},
        "verification_gflop_per_token": 2e-9 * parameters["target"] * totals["verified"] / tokens,
        "companion_share": spent["companion"] / whole,
        "acceptance_rate": totals["accepted"] / totals["verified"] if totals["verified"] else None,
        "wasted_share": wasted / (totals["steps"] + totals["verified"]),
    }


class VerificationCost(Study):
    """Operations of SD and SV, acceptance, the companion's share."""

    name = "verification-cost"
    title = "What verification costs"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Counted in turns at each batch size."""
        s = bench.settings
        models = bench.timed_models
        assert models.draft is not None
        assert models.companion is not None
        parameters = {
            "target": models.target.num_parameters,
            "draft": models.draft.num_parameters,
            "companion": models.companion.num_parameters,
        }
        everybody = bench.contenders(_POLICIES)
        batches = {}
        for size in s.batch_sizes:
            bench.status(f"batch {size}")
            begin(everybody, bench.prompts, bench.sampling, size)
            compete(everybody, s.rounds, 2 * s.turn, s.warm_up_steps, 5)
            batches[str(size)] = {each.name: figures_of(each, parameters) for each in everybody}
        return {"parameters": parameters, "batches": batches}

    @styled
    def draw(self, data: Data) -> Figure:
        """Operations per token, stacked; acceptance."""
        batches = data["batches"]
        figure, (work, accepted) = panels(2, width=4.8)
        names = list(_POLICIES)
        width = 0.8 / len(batches)
        for number, (size, own) in enumerate(batches.items()):
            at = np.arange(len(names)) + (number - (len(batches) - 1) / 2) * width
            bottom = np.zeros(len(names))
            for role_number, role in enumerate(_ROLES):
                values = np.array([own[name]["gflop_per_token"][role] for name in names])
                work.bar(
                    at,
                    values,
                    width * 0.92,
                    bottom=bottom,
                    color=COLOURS[role_number],
                    hatch=HATCHES[role_number],
                    edgecolor="white",
                    label=role if number == 0 else None,
                )
                bottom += values
            for x, top in zip(at, bottom, strict=True):
                work.annotate(size, (x, top), ha="center", va="bottom", fontsize=6)
            rates = [own[name]["acceptance_rate"] or np.nan for name in names]
            accepted.plot(
                range(len(names)),
                rates,
                "osD^vP"[number % 6],
                color=COLOURS[number],
                label=f"batch {size}",
            )
        work.set_xticks(range(len(names)), names, rotation=20)
        work.set_ylabel("GFLOP per token (above: batch size)")
        work.legend(frameon=False)
        accepted.set_xticks(range(len(names)), names, rotation=20)
        accepted.set_ylabel("share of verified tokens accepted")
        accepted.set_ylim(0, 1)
        accepted.legend(frameon=False)
        return figure

    def tell(self, data: Data) -> Account:
        """SV against a fixed length."""
        batches = data["batches"]
        saved, more, shares = {}, {}, {}
        for size, own in batches.items():
            fixed, sv = own["fixed:5"], own["sv-published:5"]
            saved[size] = (
                1 - sv["verification_gflop_per_token"] / fixed["verification_gflop_per_token"]
            )
            more[size] = (sv["acceptance_rate"] or 0.0) / fixed["acceptance_rate"] - 1
            shares[size] = sv["companion_share"]
        last = list(batches)[-1]
        wasted = batches[last]["fixed:5"]["wasted_share"]
        ours = {size: own["sv:5"]["companion_share"] for size, own in batches.items()}
        text = (
            f"At batch {last} a fixed length of 5 spends {wasted:.0%} of what the target computes "
            f"on rejected tokens. The published SV verifies for {saved[last]:.0%} fewer operations "
            f"per token there, with {more[last]:.0%} more of the verified tokens accepted; its "
            f"companion takes {shares[last]:.1%} of all operations. Lossless SV asks its companion "
            f"only while that pays: {', '.join(f'{v:.1%} at {s}' for s, v in ours.items())}."
        )
        return Account(
            text,
            [
                Finding.of(
                    "SV verifies with 18 to 45 % fewer operations than fixed speculation.",
                    "as published, fewer by "
                    + ", ".join(f"{v:.0%} at batch {s}" for s, v in saved.items()),
                    [v > 0.15 for v in saved.values()],
                ),
                Finding.of(
                    "More of what is verified is accepted (by about 20 %).",
                    "as published, more by "
                    + ", ".join(f"{v:.0%} at batch {s}" for s, v in more.items()),
                    [v > 0.05 for v in more.values()],
                ),
                Finding.of(
                    "The companion adds 1.3 to 5.3 % of compute.",
                    ", ".join(f"{v:.1%} at batch {s}" for s, v in shares.items()),
                    [v < 0.06 for v in shares.values()],
                ),
                Finding.of(
                    "Over 40 % of the verification of fixed speculation is wasted on rejected "
                    "tokens.",
                    f"{1 - batches[last]['fixed:5']['acceptance_rate']:.0%} of the verified tokens "
                    f"are rejected at batch {last}",
                    1 - batches[last]["fixed:5"]["acceptance_rate"] > 0.4,
                ),
            ],
        )
