"""Predicted against observed acceptance, estimator by estimator.

Beyond the sources. Fitted on one half of the drafts and judged on the other (offline); begun
without a profile and learning as tokens are judged (online); and fitted on one task but used on
another, frozen or learning (drift). The error is the expected calibration error: how far
predictions are off on average, bin by bin, weighted by how likely a token is to be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS, look
from draftwise.estimators.calibration import RunningCalibration
from draftwise.estimators.classifier import AcceptanceHead, features
from draftwise.estimators.combined import Inputs, SignalModel, Signals
from draftwise.estimators.information import pearson
from draftwise.estimators.records import Records
from draftwise.estimators.tables import AcceptanceTable
from draftwise.studies.drawing import bars, panels, styled
from draftwise.studies.positions import Floats
from draftwise.studies.study import OWN, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

Predict = Callable[[Records], Floats]
# Tokens that are judged between two updates of an estimator that learns.
_AT_ONCE = 64
_NUM_BINS = 10
_FREE = ("q(x)", "1 − √(0.15·H)", "history")


def simple_estimators() -> dict[str, Predict]:
    """Those without parameters."""
    return {
        "q(x)": lambda records: records.token_prob.astype(np.float64),
        "1 − √(0.15·H)": lambda records: (
            1 - np.sqrt(0.15 * records.entropy.astype(np.float64).clip(min=0))
        ).clip(0.0, 1.0),
        "history": lambda records: records.history.astype(np.float64),
    }


def fitted_estimators(records: Records) -> dict[str, Predict]:
    """Those that are fitted, by name."""
    table = AcceptanceTable.fit(records, "adaptive")
    head = AcceptanceHead.fit(records)
    fitted: dict[str, Predict] = {
        "table of S and A": lambda part: _table(table, part),
        "classifier (DISCO)": lambda part: _head(head, part),
    }
    for inputs in Inputs:
        model = SignalModel.fit(records, inputs)
        fitted[f"signals, {inputs.value}"] = lambda part, m=model: m.predict(  # type: ignore[misc]
            Signals.of(part)
        )
    return fitted


def _table(table: AcceptanceTable, part: Records) -> Floats:
    s, a = torch.from_numpy(part.overlap), torch.from_numpy(part.agreement)
    return table.predict(s, a).double().numpy()


def _head(head: AcceptanceHead, part: Records) -> Floats:
    columns = (part.entropy, part.token_prob, part.top_prob, part.position, part.history)
    x = features(*(torch.from_numpy(np.asarray(c, dtype=np.float32)) for c in columns))
    return head.predict(x).double().numpy()


def learning(records: Records, start: Records | None = None) -> dict[str, Floats]:
    """Predictions of estimators that learn from each token after they judged it.

    Args:
        records: in the order in which they come.
        start: what they are fitted to before; ``None`` for nothing.

    Returns:
        ``[len(records)]`` by estimator.
    """
    table = AcceptanceTable.prior() if start is None else AcceptanceTable.fit(start, "adaptive")
    models = {
        f"signals, {inputs.value}": SignalModel(inputs)
        if start is None
        else SignalModel.fit(start, inputs)
        for inputs in Inputs
    }
    predicted: dict[str, list[Floats]] = {"table of S and A": [], **{n: [] for n in models}}
    reached = records.reached()
    for first in range(0, len(records), _AT_ONCE):
        index = np.arange(first, min(first + _AT_ONCE, len(records)))
        part, weight = records.take(index), reached[index]
        predicted["table of S and A"].append(_table(table, part))
        table.observe(
            torch.from_numpy(part.overlap),
            torch.from_numpy(part.agreement),
            torch.from_numpy(part.acceptance),
            torch.from_numpy(weight),
        )
        signals = Signals.of(part)
        for name, model in models.items():
            predicted[name].append(model.predict(signals))
            model.observe(signals, part.acceptance.astype(float), weight.astype(float))
    return {name: np.concatenate(parts) for name, parts in predicted.items()}


def judged(predicted: Floats, records: Records) -> dict[str, Any]:
    """Calibration error, correlation and reliability curve of predictions.

    Args:
        predicted: ``[len(records)]`` probabilities.
        records: what became of the tokens.
    """
    weight = records.reached()
    calibration = RunningCalibration()
    calibration.observe(predicted, records.acceptance, weight)
    bins = np.minimum((predicted * _NUM_BINS).astype(int), _NUM_BINS - 1)
    curve = []
    for number in range(_NUM_BINS):
        here = (bins == number) & (weight > 0)
        if here.sum() >= 5:
            curve.append(
                {
                    "predicted": float(np.average(predicted[here], weights=weight[here])),
                    "observed": float(np.average(records.acceptance[here], weights=weight[here])),
                    "weight": float(weight[here].sum()),
                }
            )
    return {
        "error": calibration.error,
        "correlation": pearson(predicted.astype(np.float32), records.acceptance, weight),
        "curve": curve,
    }


def halves(records: Records) -> tuple[Records, Records]:
    """The earlier half of the drafts and the later one."""
    earlier = records.chain < np.median(records.chain)
    return records.take(earlier), records.take(~earlier)


def figures_of(records: Records) -> dict[str, Any]:
    """Offline and online, on the later half."""
    first, second = halves(records)
    offline = simple_estimators() | fitted_estimators(first)
    return {
        "num_tokens": len(second),
        "acceptance": float(np.average(second.acceptance, weights=second.reached())),
        "offline": {name: judged(predict(second), second) for name, predict in offline.items()},
        "online": {name: judged(p, second) for name, p in learning(second).items()},
    }


def drift_of(before: Records, after: Records) -> dict[str, dict[str, float]]:
    """Errors on the later half of another workload.

    Returns:
        By estimator: ``frozen`` and ``learning`` as fitted to the first workload, ``at home`` as
        fitted to the earlier half of the second.
    """
    earlier, later = halves(after)
    frozen, home = fitted_estimators(before), fitted_estimators(earlier)
    adapting = learning(after, before)
    is_later = after.chain >= np.median(after.chain)
    return {
        name: {
            "frozen": judged(frozen[name](later), later)["error"],
            "learning": judged(adapting[name][is_later], later)["error"],
            "at home": judged(home[name](later), later)["error"],
        }
        for name in adapting
    }


class Calibration(Study):
    """Calibration of every estimator: offline, online, and under drift."""

    name = "calibration"
    title = "Are estimates of acceptance right?"
    source = OWN
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """On all prompts, and from the easiest task to the hardest."""
        figures = figures_of(bench.collection().records)
        # Where there are too few prompts of a task, its error would be mostly noise.
        tasks = {
            task.name: bench.collection(task=task).records
            for task in bench.larger_tasks
            if len(task.prompts) >= 2 * bench.settings.num_prompts
        }
        if len(tasks) > 1:
            means = {
                name: float(np.average(each.acceptance, weights=each.reached()))
                for name, each in tasks.items()
            }
            easy, hard = max(means, key=lambda n: means[n]), min(means, key=lambda n: means[n])
            figures["drift"] = {
                "from": easy,
                "to": hard,
                "acceptance": [means[easy], means[hard]],
                "num_tokens": [len(tasks[easy]), len(tasks[hard])],
                "errors": drift_of(tasks[easy], tasks[hard]),
            }
        return figures

    @styled
    def draw(self, data: Data) -> Figure:
        """Reliability; errors; drift."""
        figure, (curves, errors, drift) = panels(3, width=4.2, height=3.6)
        for number, (name, own) in enumerate(data["offline"].items()):
            at = [point["predicted"] for point in own["curve"]]
            curves.plot(at, [p["observed"] for p in own["curve"]], label=name, **look(number))
        curves.plot([0, 1], [0, 1], ":", color="black", linewidth=1)
        curves.set_xlabel("predicted acceptance")
        curves.set_ylabel("observed acceptance")
        curves.set_title("fitted on the other half")
        curves.legend(frameon=False, fontsize=6.5)
        named = {f"{n}, offline": o["error"] for n, o in data["offline"].items()}
        named |= {f"{n}, online": o["error"] for n, o in data["online"].items()}
        bars(errors, list(named), list(named.values()), digits=3)
        errors.tick_params(axis="y", labelsize=7)
        errors.set_xlabel("expected calibration error")
        moved = data.get("drift")
        if moved is not None:
            names = list(moved["errors"])
            for number, way in enumerate(("frozen", "learning", "at home")):
                drift.plot(
                    [moved["errors"][name][way] for name in names],
                    range(len(names)),
                    "osD"[number],
                    color=COLOURS[number],
                    label=way,
                )
            drift.set_yticks(range(len(names)), names, fontsize=7)
            drift.invert_yaxis()
            drift.set_xlim(left=0)
            drift.set_xlabel("expected calibration error")
            drift.set_title(f"from {moved['from']} to\n{moved['to']}", fontsize=8)
            drift.legend(frameon=False, fontsize=7)
        else:
            drift.axis("off")
        return figure

    def tell(self, data: Data) -> Account:
        """Who is right, and who stays right."""
        offline, online = data["offline"], data["online"]
        best = min(offline, key=lambda name: offline[name]["error"])
        said = ", ".join(f"{name} {own['error']:.3f}" for name, own in offline.items())
        learnt = ", ".join(f"{name} {own['error']:.3f}" for name, own in online.items())
        text = (
            f"Expected calibration error on {data['num_tokens']} drafted tokens that the fits have "
            f"not seen: {said}; least, {best}. Without a profile, learning as they go: {learnt}."
        )
        simple = [offline[name]["error"] for name in _FREE]
        fitted = [own["error"] for name, own in offline.items() if name not in _FREE]
        findings = [
            Finding.of(
                "Estimates that are fitted are better calibrated than raw signals (ours).",
                f"at most {max(fitted):.3f} against at least {min(simple):.3f}",
                max(fitted) < min(simple),
            ),
            Finding.of(
                "The combination of signals orders tokens best (ours).",
                f"correlation with the acceptance {_r(offline, 'signals, combined'):.2f}; table "
                f"of S and A {_r(offline, 'table of S and A'):.2f}, without the companion "
                f"{_r(offline, 'signals, free'):.2f}, q(x) {_r(offline, 'q(x)'):.2f}",
                _r(offline, "signals, combined") >= max(o["correlation"] for o in offline.values()),
            ),
        ]
        moved = data.get("drift")
        if moved is not None:
            means = moved["acceptance"]
            worse = {n: e["frozen"] - e["learning"] for n, e in moved["errors"].items()}
            text += (
                f" From {moved['from']} (acceptance {means[0]:.2f}) to {moved['to']} "
                f"({means[1]:.2f}), frozen against learning: "
                + ", ".join(
                    f"{n} {e['frozen']:.3f} against {e['learning']:.3f}"
                    for n, e in moved["errors"].items()
                )
                + "."
            )
            findings.append(
                Finding.of(
                    "Learning while running makes up for a change of workload (ours).",
                    f"error smaller than frozen for {sum(w > 0 for w in worse.values())} of "
                    f"{len(worse)} estimators",
                    [w > 0 for w in worse.values()],
                )
            )
        return Account(text, findings)


def _r(own: Mapping[str, Any], name: str) -> float:
    return float(own[name]["correlation"])
