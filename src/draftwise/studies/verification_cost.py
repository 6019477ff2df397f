"""Cost of verification: operations per token, acceptance rate, and the companion's share.

Recomputes SV's cost of verification (Kim et al. 2025): floating-point operations of speculative
decoding (SD) and SV, the acceptance rate of verified tokens, and the companion's share of all
operations. The source found 18 to 45 % fewer operations for verification, an acceptance rate about
20 % higher, and a companion that adds 1 to 5 % of compute.

A model is counted with two operations per parameter and token. Only decoding is counted, without
prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS, HATCHES
from draftwise.benchmark.sustained import BatchContender, begin, compete
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICIES = ("none", "fixed:5", "sv-published:5", "sv:5")
_ROLES = ("target", "draft", "companion")


def operations(totals: Mapping[str, int], parameters: Mapping[str, int]) -> dict[str, float]:
    """Floating-point operations of decoding, by model.

    Args:
        totals: totals over requests: ``steps``, ``drafted``, ``verified``, ``scored``.
        parameters: number of parameters of each model, by role.
    """
    tokens = {
        "target": totals["steps"] + totals["verified"],
        # The draft processes the newest token and all drafted tokens but the last.
        "draft": totals["drafted"],
        "companion": totals["scored"],
    }
    return {role: 2.0 * parameters[role] * tokens[role] for role in _ROLES}


def figures_of(contender: BatchContender, parameters: Mapping[str, int]) -> dict[str, Any]:
    """Operations of one policy per generated token."""
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
    """Operations of SD and SV, acceptance rate, and the companion's share."""

    name = "verification-cost"
    title = "Cost of verification"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Count operations in interleaved turns at each batch size."""
        s = bench.settings
        models = bench.timed_models
        assert models.draft is not None
        assert models.companion is not None
        parameters = {
            "target": models.target.num_parameters,
            "draft": models.draft.num_parameters,
            "companion": models.companion.num_parameters,
        }
        contenders = bench.contenders(_POLICIES)
        batches = {}
        for size in s.batch_sizes:
            bench.status(f"batch {size}")
            begin(contenders, bench.prompts, bench.sampling, size)
            compete(contenders, s.rounds, 2 * s.turn, s.warm_up_steps, 5)
            batches[str(size)] = {each.name: figures_of(each, parameters) for each in contenders}
        return {"parameters": parameters, "batches": batches}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw operations per token by model, and acceptance rates."""
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
        accepted.set_ylabel("fraction of verified tokens accepted")
        accepted.set_ylim(0, 1)
        accepted.legend(frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Compare SV with a fixed length."""
        batches = data["batches"]
        saved, more, shares = {}, {}, {}
        for size, own in batches.items():
            fixed, sv = own["fixed:5"], own["sv-published:5"]
            saved[size] = (
                1 - sv["verification_gflop_per_token"] / fixed["verification_gflop_per_token"]
            )
            more[size] = (sv["acceptance_rate"] or 0.0) / fixed["acceptance_rate"] - 1
            shares[size] = sv["companion_share"]
        last = max(batches, key=int)
        wasted = batches[last]["fixed:5"]["wasted_share"]
        ours = {size: own["sv:5"]["companion_share"] for size, own in batches.items()}
        text = (
            f"At batch {last}, a fixed length of 5 spends {wasted:.0%} of the target's operations "
            f"on tokens that are not accepted. The published SV needs {saved[last]:.0%} fewer "
            "operations per token for verification, and its acceptance rate is "
            f"{more[last]:.0%} higher. Its companion takes {shares[last]:.1%} of all operations. "
            "Lossless SV runs its companion only while that increases goodput; its share is "
            f"{', '.join(f'{v:.1%} at batch {s}' for s, v in ours.items())}."
        )
        return Description(
            text,
            [
                Finding.of(
                    "SV needs 18 to 45 % fewer operations for verification than a fixed length.",
                    "as published, fewer by "
                    + ", ".join(f"{v:.0%} at batch {s}" for s, v in saved.items()),
                    [v >= 0.18 for v in saved.values()],
                ),
                Finding.of(
                    "The acceptance rate of verified tokens is about 20 % higher.",
                    "as published, higher by "
                    + ", ".join(f"{v:.0%} at batch {s}" for s, v in more.items()),
                    [v >= 0.15 for v in more.values()],
                ),
                Finding.of(
                    "The companion adds 1.3 to 5.3 % of compute.",
                    ", ".join(f"{v:.1%} at batch {s}" for s, v in shares.items()),
                    [v < 0.06 for v in shares.values()],
                ),
                Finding.of(
                    "With a fixed length, over 40 % of the verification is wasted on tokens that "
                    "are not accepted.",
                    f"{1 - batches[last]['fixed:5']['acceptance_rate']:.0%} of the verified tokens "
                    f"are not accepted at batch {last}",
                    1 - batches[last]["fixed:5"]["acceptance_rate"] > 0.4,
                ),
            ],
        )
