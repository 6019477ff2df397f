"""Goodput of policies by the cost of the draft relative to the target.

Recomputes the main result of SV (Kim et al. 2025) at the cost ratios of its model pairs.

The pairs of Kim et al. 2025 (SV) and Zhang et al. 2024 (SVIP) have drafts of a hundredth to a ninth
of the target's parameters, and SV's companions have one to three times those of the draft. The
bundled draft is two hundred times smaller than the inflated target. So draft and companion are
inflated as well: they draft and judge the same tokens, at the cost of a larger model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwise.benchmark.sustained import begin, best_static, best_static_unbiased, compete, summary
from draftwise.errors import InvalidParameterError
from draftwise.studies.drawing import heat_map, panels, styled
from draftwise.studies.goodput import geometric_mean
from draftwise.studies.settings import StudySettings
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench
from draftwise.zoo import PREFIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STATIC = ("fixed:1", "fixed:2", "fixed:3", "fixed:5")
_POLICIES = (*_STATIC, "svip", "smartspec", "sv-published", "sv", "adaptive")
_BEST = "best static"
# Parameters of the companion relative to those of the draft.
_COMPANION_SIZE = 2
# Smallest batch size that counts as large.
_LARGE = 8


class CostRatio(Study):
    """Policies × batch sizes × cost ratios."""

    name = "cost-ratio"
    title = "Goodput by the cost of the draft"
    source = SV
    timed = True
    needs_companion = True

    @classmethod
    def check_models(cls, settings: StudySettings) -> None:
        """Check that the models can be inflated.

        Raises:
            InvalidParameterError: a model is missing, or is not a bundled one.
        """
        super().check_models(settings)
        for role in ("target", "draft", "companion"):
            name = getattr(settings, role)
            if not name.startswith(PREFIX):
                raise InvalidParameterError(
                    role, f"the study {cls.name} inflates models of the zoo, got {name!r}"
                )

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure all policies in interleaved turns, ratio by ratio."""
        size = bench.large.target.num_parameters
        found = []
        # Small models first: if one cannot be inflated so little, nothing was measured in vain.
        for ratio in sorted(bench.settings.cost_ratios, reverse=True):
            own = at_cost_ratio(bench, ratio)
            try:
                found.append({"cost_ratio": ratio, **_measured(own, size)})
            finally:
                own.close()
        return {"policies": list(_POLICIES), "target_parameters": size, "ratios": found}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw one heat map per cost ratio."""
        policies = data["policies"]
        figure, axes = panels(len(data["ratios"]), width=3.4, height=3.2, sharey=True)
        for panel, row in zip(axes, data["ratios"], strict=True):
            heat_map(
                panel,
                [[cell[name]["ratio"] for cell in row["batches"].values()] for name in policies],
                list(row["batches"]),
                policies,
                f"draft 1/{row['cost_ratio']:g}: × target only",
                limits=(0.5, 2.0),
            )
            panel.set_xlabel("batch size")
        return figure

    def describe(self, data: Data) -> Description:
        """Compare SV with fixed lengths, ratio by ratio."""
        rows, policies = data["ratios"], data["policies"]
        said = [
            f"1/{row['cost_ratio']:g} of the parameters (a pass of the target takes "
            f"{row['pass_time']:.0f} passes of the draft, and {row['companion_pass_time']:.0f} of "
            f"the companion): {_by_batch(row, [*policies, _BEST])}"
            for row in rows
        ]
        text = (
            f"Tokens per second relative to target-only decoding. The draft has {'; '.join(said)}. "
            "The best static length is chosen in hindsight, cross-validated."
        )
        sizes = list(rows[0]["batches"])
        chosen = [each for each in sizes if int(each) >= _LARGE] or sizes[-1:]
        large = [[row["batches"][each] for each in chosen] for row in rows]

        def means(name: str, against: str) -> list[float]:
            return [_mean(cells, name, against) for cells in large]

        def shown(values: Sequence[float]) -> str:
            return ", ".join(
                f"{value:.2f} at 1/{row['cost_ratio']:g}"
                for value, row in zip(values, rows, strict=True)
            )

        lossless, published = means("sv", "fixed:5"), means("sv-published", "fixed:5")
        against_best, ours = means("sv", _BEST), means("adaptive", _BEST)
        svip = means("svip", "fixed:5")
        return Description(
            text,
            [
                Finding.of(
                    "At large batches SV is 1.4 times as fast as fixed-length speculative decoding "
                    "on average.",
                    f"lossless {shown(lossless)}; as published {shown(published)}",
                    [max(pair) >= 1.4 for pair in zip(lossless, published, strict=True)],
                ),
                Finding.of(
                    "SV is faster than every fixed length.",
                    f"relative to the best static length: {shown(against_best)}",
                    [value > 1.0 for value in against_best],
                ),
                Finding.of(
                    "SVIP is faster than fixed-length speculative decoding.",
                    shown(svip),
                    [value > 1.0 for value in svip],
                ),
                Finding.of(
                    "`adaptive` is at least as fast as the best static length.",
                    shown(ours),
                    [value >= 1.0 for value in ours],
                ),
            ],
        )


def _measured(bench: Workbench, target_size: int) -> dict[str, Any]:
    """Costs and goodput with the models of a workbench."""
    settings, latency, models = bench.settings, bench.latency, bench.timed_models
    assert models.draft is not None
    assert models.companion is not None
    contenders = bench.contenders(["none", *_POLICIES])
    cells = {}
    for batch_size in settings.batch_sizes:
        bench.status(f"{models.draft.name}, batch {batch_size}")
        begin(contenders, bench.prompts, bench.sampling, batch_size)
        compete(contenders, settings.rounds, settings.turn, settings.warm_up_steps)
        cell = summary(contenders)
        cell[_BEST] = {"name": best_static(cell), "ratio": best_static_unbiased(cell)}
        cells[str(batch_size)] = cell
    for each in contenders:
        each.restart()
        each.llm.close()
    target, gamma = latency.target_seconds(1), settings.num_speculative_tokens
    draft = latency.drafting_seconds([1] * gamma) / gamma
    return {
        "draft": models.draft.name,
        "companion": models.companion.name,
        "parameters": target_size / models.draft.num_parameters,
        "pass_time": target / draft,
        "companion_pass_time": target / latency.companion_seconds(1),
        "batches": cells,
    }


def at_cost_ratio(bench: Workbench, ratio: float) -> Workbench:
    """A workbench whose small models are inflated, for the same target and prompts.

    Args:
        bench: workbench with a draft and a companion of the zoo. Other models of its ``models``
            are left out.
        ratio: parameters of the target relative to those of the draft. The other models get twice
            those of the draft.
    """
    settings = bench.settings
    assert settings.companion is not None
    draft_size = bench.large.target.num_parameters / ratio
    size = _COMPANION_SIZE * draft_size
    return bench.beside(
        _inflated(settings.draft, draft_size),
        _inflated(settings.companion, size),
        tuple(_inflated(name, size) for name in settings.models if name.startswith(PREFIX)),
    )


def _inflated(name: str, num_parameters: float) -> str:
    """The name of a bundled model, inflated to a number of parameters."""
    return f"{name.partition('@')[0]}@{round(num_parameters / 1000)}k"


def _mean(cells: Sequence[Mapping[str, Any]], name: str, against: str) -> float:
    return geometric_mean(cell[name]["ratio"] / cell[against]["ratio"] for cell in cells)


def _by_batch(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(
        f"batch {size}: " + ", ".join(f"{name} {cell[name]['ratio']:.2f}" for name in names)
        for size, cell in row["batches"].items()
    )
