"""Information of each signal about acceptance, and the goodput that it reaches.

This study goes beyond the sources. It compares, on the same drafts, the signals of several
published rules: the companion's S and A of Speculative Verification (Kim et al. 2025), the entropy
of SVIP (Zhang et al. 2024), the largest probability of vLLM's adaptive verification, the
probability of the drawn token and the confidence head of DSpark. Each is compared by its
information about acceptance, by the calibration of estimates from it, and by the goodput of the
same decisions, with the measured times of all passes that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwise.benchmark.style import look
from draftwise.studies.drawing import panels, styled
from draftwise.studies.signals import claims, kinds
from draftwise.studies.signals.measuring import Measurement
from draftwise.studies.signals.pass_times import PassTimes, pass_times
from draftwise.studies.signals.recording import companion_names, record
from draftwise.studies.study import SV, Data, Description, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Signals(Study):
    """Information, calibration and goodput of each signal."""

    name = "signals"
    title = "When is a companion worth its pass?"
    source = SV
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Time passes, record drafts, and evaluate every signal at every sampling setting."""
        settings, names = bench.settings, companion_names(bench)
        times = pass_times(bench, names)
        samplings = {}
        for sampling in settings.samplings:
            measurement = Measurement(record(bench, sampling), sampling, times)
            bench.status(f"information at {sampling.name}")
            knowledge, batches = measurement.knowledge(), {}
            for size in settings.batch_sizes:
                bench.status(f"goodput at {sampling.name}, batch {size}")
                batches[str(size)] = measurement.goodput(size)
            samplings[sampling.name] = {"knowledge": knowledge, "batches": batches}
        return {
            "target": settings.target,
            "draft": settings.draft,
            "companions": names,
            "costs": _costs(times, settings.num_speculative_tokens),
            "pass_times": times.to_dict(),
            "samplings": samplings,
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw information, calibration error and goodput, one row per kind of signal."""
        rows = _rows(data)
        sizes = list(next(iter(data["samplings"].values()))["batches"])
        height = 1.5 + 0.2 * len(rows)
        figure, axes = panels(2 + len(sizes), width=2.35, height=height, sharey=True)
        for number, (name, own) in enumerate(data["samplings"].items()):
            shift = 0.22 * (number - (len(data["samplings"]) - 1) / 2)
            style = look(number) | {"linestyle": "none"}
            knowledge = [_signal(own["knowledge"], row) for row in rows]
            bits = [each["bits"] for each in knowledge]
            _points(axes[0], bits, shift, style, name)
            errors = [{"mean": e["calibration_error"], "error": 0.0} for e in knowledge]
            _points(axes[1], errors, shift, style)
            for panel, size in zip(axes[2:], sizes, strict=True):
                gains = [_signal(own["batches"][size], row)["over_static"] for row in rows]
                _points(panel, gains, shift, style)
        axes[0].set_yticks(range(len(rows)), [label for label, _, _ in rows])
        axes[0].invert_yaxis()
        axes[0].set_xlabel("information, bits")
        axes[1].set_xlabel("calibration error")
        for panel, size in zip(axes[2:], sizes, strict=True):
            panel.axvline(1.0, color="black", linewidth=0.8)
            panel.set_xlabel("goodput / static length")
            panel.set_title(f"batch {size}", fontsize=9)
        figure.legend(loc="outside lower center", ncols=len(data["samplings"]), frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Say when a companion is worth its pass, and compare the claims."""
        said = [
            f"{sampling}: the draft's own signals have "
            f"{own['knowledge']['signals'][kinds.OWN]['bits']['mean']:.3f} of "
            f"{own['knowledge']['entropy']:.3f} bits"
            + "".join(
                f", {name} adds {_with_error(told['beyond_own'])}"
                for name, told in own["knowledge"]["companions"].items()
            )
            for sampling, own in data["samplings"].items()
        ]
        text = f"Information about acceptance at {'; at '.join(said)}. {_advice(data)}"
        return Description(text.strip(), claims.findings(data))


def _with_error(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['error']:.3f}"


def _costs(times: PassTimes, length: int) -> dict[str, Any]:
    """Times of single passes, relative to the target's pass over one token."""
    target = times.target(1)
    return {
        "target_seconds": target,
        "first_draft": times.draft.first(1) / target,
        "draft": times.draft.later(1) / target,
        "draft_without_signals": times.draft_without_signals.later(1) / target,
        "keep": times.keep(1) / target,
        "companions": {name: cost(length) / target for name, cost in times.companions.items()},
    }


def _rows(data: Data) -> list[tuple[str, str | None, str]]:
    """Label, companion and kind of each row of the figure."""
    first = next(iter(data["samplings"].values()))["knowledge"]
    rows: list[tuple[str, str | None, str]] = [(name, None, name) for name in first["signals"]]
    oracle = rows.pop()
    several = len(first["companions"]) > 1
    for name, told in first["companions"].items():
        short = name.rstrip("/").split("/")[-1].removeprefix("zoo:")
        rows += [(f"{kind} ({short})" if several else kind, name, kind) for kind in told["signals"]]
    return [*rows, oracle]


def _signal(found: Mapping[str, Any], row: tuple[str, str | None, str]) -> Mapping[str, Any]:
    _, companion, kind = row
    own: Mapping[str, Any] = found if companion is None else found["companions"][companion]
    result: Mapping[str, Any] = own["signals"][kind]
    return result


def _points(
    axes: Axes,
    values: Sequence[Mapping[str, float]],
    shift: float,
    style: Mapping[str, Any],
    label: str | None = None,
) -> None:
    axes.errorbar(
        [value["mean"] for value in values],
        [place + shift for place in range(len(values))],
        xerr=[value["error"] for value in values],
        label=label,
        elinewidth=0.8,
        **style,
    )
    axes.grid(axis="y", visible=False)


def _advice(data: Data) -> str:
    """What a companion's pass may take, and what it takes."""
    parts = []
    for size in next(iter(data["samplings"].values()))["batches"]:
        for name in data["companions"]:
            own = [each["batches"][size]["companions"][name] for each in data["samplings"].values()]
            may, does = (", ".join(f"{o[key]:.1%}" for o in own) for key in ("affordable", "cost"))
            parts.append(f"{name} {may} at batch {size}, and takes {does}")
    if not parts:
        return ""
    return (
        "The pass of a companion is worth at most this share of the target's pass, by sampling "
        f"setting: {'; '.join(parts)}."
    )
