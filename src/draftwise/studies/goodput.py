"""Goodput of policies over tasks and batch sizes.

Recomputes SV's main result (Kim et al. 2025): throughput of target-only decoding, speculative
decoding with a fixed length, and SV, over tasks and batch sizes, with policies of other sources
beside them. The abstract reports that SV is faster than target-only decoding and speculative
decoding in all cases. At large batches it is up to 1.9 times as fast as speculative decoding, and
1.4 times on average, and fixed-length speculation is slower than target-only decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.sustained import begin, compete, summary
from draftwise.studies.drawing import heat_map, panels, styled
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Policies of other sources that SV is compared with.
_OTHERS = ("svip", "smartspec", "staged")
# Policies that are also measured with an EAGLE head as the draft, and how their names begin then.
_WITH_HEAD = ("fixed:5", "sv")
_HEAD = "head, "
_POLICIES = ("fixed:2", "fixed:5", *_OTHERS, "sv-published", "adaptive", "sv")
# Smallest batch size that counts as large.
_LARGE = 8


def geometric_mean(values: Any) -> float:
    """Geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(np.asarray(list(values), dtype=float)))))


class Goodput(Study):
    """Policies × batch sizes × tasks."""

    name = "goodput"
    title = "Goodput over tasks and batch sizes"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure all policies in interleaved turns, task by task."""
        s = bench.settings
        policies = list(_POLICIES)
        contenders = bench.contenders(["none", *policies])
        if s.head is not None:
            with closing(bench.beside(s.head, s.companion)) as beside:
                with_head = beside.contenders(_WITH_HEAD)
            for each in with_head:
                each.name = _HEAD + each.name
                policies.append(each.name)
            contenders += with_head
        cells: dict[str, dict[str, Any]] = {}
        for batch_size in s.batch_sizes:
            learnt = False
            for task in bench.tasks:
                bench.status(f"{task.name}, batch {batch_size}")
                begin(contenders, task.prompts, bench.sampling, batch_size)
                rounds = max(2, (s.rounds - 1) // max(1, 4 - batch_size))
                # Policies keep what they have learnt at this batch size from task to task.
                steps = (0, 0) if learnt else (s.warm_up_steps, 5)
                compete(contenders, rounds, s.turn, *steps)
                learnt = True
                cells.setdefault(task.name, {})[str(batch_size)] = summary(contenders)
        return {"policies": policies, "tasks": cells}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw one heat map per batch size."""
        tasks, policies = data["tasks"], data["policies"]
        sizes = list(next(iter(tasks.values())))
        width, height = 0.8 + 0.42 * len(policies), 1.6 + 0.32 * len(tasks)
        figure, axes = panels(len(sizes), width=width, height=height, sharey=True)
        for panel, size in zip(axes, sizes, strict=True):
            values = [[own[size][name]["ratio"] for name in policies] for own in tasks.values()]
            # Fixed limits, so that colours are comparable between batch sizes.
            heat_map(
                panel,
                [*values, [geometric_mean(column) for column in zip(*values, strict=True)]],
                policies,
                [*tasks, "geometric mean"],
                f"batch {size}: × target only",
                limits=(0.5, 2.5),
            )
        return figure

    def describe(self, data: Data) -> Description:
        """Compare the policies by their geometric means over tasks."""
        tasks = data["tasks"]
        sizes = list(next(iter(tasks.values())))

        def mean(name: str, size: str, against: str = "none") -> float:
            return geometric_mean(
                own[size][name]["ratio"] / own[size][against]["ratio"] for own in tasks.values()
            )

        said = []
        for size in sizes:
            each = ", ".join(f"{name} {mean(name, size):.2f}" for name in data["policies"])
            said.append(f"batch {size}: {each}")
        error = np.mean([e for own in tasks.values() for e in _errors(own)])
        text = (
            f"Geometric means over {len(tasks)} tasks ({', '.join(tasks)}), relative to "
            f"target-only decoding: {'; '.join(said)}. The mean standard error of a cell is "
            f"{error:.2f}."
        )
        last = max(sizes, key=int)
        large = [size for size in sizes if int(size) >= _LARGE] or [last]
        ahead = [mean("sv", size, "fixed:5") for size in large]
        published = [mean("sv-published", size, "fixed:5") for size in large]
        findings = [
            Finding.of(
                "SV is faster than fixed-length speculative decoding at every batch size.",
                "lossless SV relative to fixed 5: "
                + ", ".join(f"{mean('sv', s, 'fixed:5'):.2f} at {s}" for s in sizes),
                [mean("sv", size, "fixed:5") > 1.0 for size in sizes],
            ),
            Finding.of(
                "At large batches SV is 1.4 times as fast on average.",
                f"{geometric_mean(ahead):.2f} (lossless), {geometric_mean(published):.2f} "
                f"(as published) at batch {' and '.join(large)}",
                geometric_mean(ahead) >= 1.4,
            ),
            Finding.of(
                "SV is faster than target-only decoding at every batch size.",
                ", ".join(f"{mean('sv', size):.2f} at {size}" for size in sizes),
                [mean("sv", size) > 1.0 for size in sizes],
            ),
            Finding.of(
                "At the largest batch, fixed-length speculation is slower than the target.",
                f"fixed 5: {mean('fixed:5', last):.2f} at {last}",
                mean("fixed:5", last) < 1.0,
            ),
        ]
        # Data of earlier versions, and data without a head, have fewer policies.
        others = {
            name: geometric_mean(mean("sv", size, name) for size in large)
            for name in _OTHERS
            if name in data["policies"]
        }
        if others:
            each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in others.items())
            findings.append(
                Finding.of(
                    "At large batches SV is faster than other policies.",
                    f"relative to {each}, at batch {' and '.join(large)}",
                    [ratio > 1.0 for ratio in others.values()],
                )
            )
        fixed, sv = (_HEAD + name for name in _WITH_HEAD)
        if sv in data["policies"]:
            ratios = [mean(sv, size, fixed) for size in sizes]
            findings.append(
                Finding.of(
                    "With an EAGLE head, SV is faster than a fixed length at every batch size.",
                    ", ".join(f"{r:.2f} at {s}" for r, s in zip(ratios, sizes, strict=True)),
                    [ratio > 1.0 for ratio in ratios],
                )
            )
        return Description(text, findings)


def _errors(sizes: Mapping[str, Any]) -> list[float]:
    return [own["standard_error"] for each in sizes.values() for own in each.values()]
