"""Calibration of every acceptance estimator.

This study goes beyond the sources. Estimators are evaluated in three settings. Offline, they are
fitted to one half of the drafts and evaluated on the other half. Online, they start without a
profile and are updated with each verified token. Under drift, they are fitted to one task and used
on another, frozen or updated online. The metric is the expected calibration error, with each token
weighted by the probability that all tokens before it are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftwise.benchmark.style import COLOURS, look
from draftwise.estimators.calibration import reliability
from draftwise.estimators.classifier import AcceptanceHead, features
from draftwise.estimators.combined import Inputs, SignalModel, Signals
from draftwise.estimators.information import pearson
from draftwise.estimators.records import Records
from draftwise.estimators.tables import AcceptanceTable
from draftwise.studies.drawing import bars, panels, styled
from draftwise.studies.positions import Floats
from draftwise.studies.study import OWN, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Predict = Callable[[Records], Floats]
# Number of tokens between two updates of an online estimator.
_AT_ONCE = 64
_FREE = ("q(x)", "1 − √(0.15·H)", "history")


def simple_estimators() -> dict[str, Predict]:
    """Estimators without fitted parameters, by name."""
    return {
        "q(x)": lambda records: records.token_prob.astype(np.float64),
        "1 − √(0.15·H)": lambda records: (
            1 - np.sqrt(0.15 * records.entropy.astype(np.float64).clip(min=0))
        ).clip(0.0, 1.0),
        "history": lambda records: records.history.astype(np.float64),
    }


def fitted_estimators(records: Records) -> dict[str, Predict]:
    """Estimators fitted to the records, by name."""
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
    """Predictions of online estimators, which are updated with tokens after predicting them.

    Args:
        records: records in temporal order.
        start: records of the initial fit; ``None`` to start from the prior.

    Returns:
        ``[len(records)]`` predictions by estimator.
    """
    table = AcceptanceTable.prior() if start is None else AcceptanceTable.fit(start, "adaptive")
    models = {
        f"signals, {inputs.value}": SignalModel(inputs)
        if start is None
        else SignalModel.fit(start, inputs)
        for inputs in Inputs
    }
    predicted: dict[str, list[Floats]] = {"table of S and A": [], **{n: [] for n in models}}
    reached = records.reach_probability()
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


def evaluate(predicted: Floats, records: Records) -> dict[str, Any]:
    """Calibration error, correlation and reliability curve of predictions.

    Args:
        predicted: ``[len(records)]`` predicted probabilities.
        records: records with the acceptance of the tokens.
    """
    weight = records.reach_probability()
    error, curve = reliability(predicted, records.acceptance, weight)
    return {
        "error": error,
        "correlation": pearson(predicted.astype(np.float32), records.acceptance, weight),
        "curve": curve,
    }


def halves(records: Records) -> tuple[Records, Records]:
    """Split records into the earlier and the later half of the drafts."""
    earlier = records.chain < np.median(records.chain)
    return records.take(earlier), records.take(~earlier)


def figures_of(records: Records) -> dict[str, Any]:
    """Evaluate offline and online estimators on the later half of the drafts."""
    first, second = halves(records)
    offline = simple_estimators() | fitted_estimators(first)
    return {
        "num_tokens": len(second),
        "acceptance": float(np.average(second.acceptance, weights=second.reach_probability())),
        "offline": {name: evaluate(predict(second), second) for name, predict in offline.items()},
        "online": {name: evaluate(p, second) for name, p in learning(second).items()},
    }


def drift_of(before: Records, after: Records) -> dict[str, dict[str, float]]:
    """Calibration errors on the later half of a second workload.

    Returns:
        Errors by estimator. ``frozen`` and ``learning`` are fitted to the first workload, and
        ``at home`` is fitted to the earlier half of the second.
    """
    earlier, later = halves(after)
    frozen, home = fitted_estimators(before), fitted_estimators(earlier)
    adapting = learning(after, before)
    is_later = after.chain >= np.median(after.chain)
    return {
        name: {
            "frozen": evaluate(frozen[name](later), later)["error"],
            "learning": evaluate(adapting[name][is_later], later)["error"],
            "at home": evaluate(home[name](later), later)["error"],
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
        """Evaluate on all prompts, and under drift from the easiest task to the hardest."""
        figures = figures_of(bench.collection().records)
        # With too few prompts of a task, its error would be mostly noise.
        tasks = {
            task.name: bench.collection(task=task).records
            for task in bench.larger_tasks
            if len(task.prompts) >= 2 * bench.settings.num_prompts
        }
        if len(tasks) > 1:
            means = {
                name: float(np.average(each.acceptance, weights=each.reach_probability()))
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
        """Draw reliability curves, errors, and errors under drift."""
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
            for number, mode in enumerate(("frozen", "learning", "at home")):
                drift.plot(
                    [moved["errors"][name][mode] for name in names],
                    range(len(names)),
                    "osD"[number],
                    color=COLOURS[number],
                    label={"learning": "online", "at home": "fitted to the task"}.get(mode, mode),
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

    def describe(self, data: Data) -> Description:
        """Describe the calibration of each estimator, and its change under drift."""
        offline, online = data["offline"], data["online"]
        best = min(offline, key=lambda name: offline[name]["error"])
        said = ", ".join(f"{name} {own['error']:.3f}" for name, own in offline.items())
        learnt = ", ".join(f"{name} {own['error']:.3f}" for name, own in online.items())
        text = (
            f"Expected calibration error on {data['num_tokens']} held-out drafted tokens: {said}. "
            f"The lowest is that of {best}. Without a profile, updated online: {learnt}."
        )
        simple = [offline[name]["error"] for name in _FREE]
        fitted = [own["error"] for name, own in offline.items() if name not in _FREE]
        findings = [
            Finding.of(
                "Fitted estimators are better calibrated than raw signals (ours).",
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
                f" Fitted to {moved['from']} (acceptance {means[0]:.2f}) and used on {moved['to']} "
                f"({means[1]:.2f}), frozen and updated online: "
                + ", ".join(
                    f"{n} {e['frozen']:.3f} and {e['learning']:.3f}"
                    for n, e in moved["errors"].items()
                )
                + "."
            )
            findings.append(
                Finding.of(
                    "Online updates compensate for a change of workload (ours).",
                    f"the error is lower than frozen for {sum(w > 0 for w in worse.values())} of "
                    f"{len(worse)} estimators",
                    [w > 0 for w in worse.values()],
                )
            )
        return Description(text, findings)


def _r(own: Mapping[str, Any], name: str) -> float:
    return float(own[name]["correlation"])
