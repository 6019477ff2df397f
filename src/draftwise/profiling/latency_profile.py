"""The file of ``draftwise profile-latency``: measured passes, machine, models and fitted curves."""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from draftwise.core.latency import Interference, LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.engine.assembly import Models
from draftwise.errors import InvalidParameterError
from draftwise.models.loading import LoadedModel
from draftwise.profiling.passes import PassShape, Stage

_FORMAT = 1
# Properties that must be equal when a profile is used, with their names in messages.
_MUST_MATCH = {
    "device": "device",
    "processor": "processor",
    "threads": "number of threads",
    "dtype": "dtype",
}


class Point(NamedTuple):
    """A measured pass.

    Attributes:
        stage: stage of the step.
        shape: shape of the pass.
        seconds: median time over the repetitions.
        num_passes: number of repetitions.
    """

    stage: Stage
    shape: PassShape
    seconds: float
    num_passes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the point as JSON-compatible values."""
        return {
            "stage": self.stage.value,
            **self.shape._asdict(),
            "seconds": self.seconds,
            "num_passes": self.num_passes,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        """The inverse of :meth:`to_dict`."""
        shape = PassShape(*(int(values[name]) for name in PassShape._fields))
        return cls(
            Stage(values["stage"]), shape, float(values["seconds"]), int(values["num_passes"])
        )


@dataclass(frozen=True)
class LatencyProfile:
    """Pass times of models on one machine.

    Attributes:
        machine: processor, number of threads, device, dtype of the weights, PyTorch version.
        models: name, fingerprint, dtype and number of parameters of each model, by role.
        points: measured passes. Those of the draft are means over the passes of a step.
        costs: fitted cost curve of each stage; for the draft, with the first pass of a step apart.
        interference: by stage, the factor by which a pass is slower while the other model runs;
            empty if it was not measured.
        created: date and time, ISO 8601.
    """

    machine: Mapping[str, str | int]
    models: Mapping[str, Mapping[str, str | int]]
    points: tuple[Point, ...]
    costs: Mapping[Stage, StageCost]
    interference: Mapping[Stage, float] = field(default_factory=dict)
    created: str = ""

    @classmethod
    def of(
        cls,
        models: Models,
        points: Iterable[Point],
        first_draft_extra: float = 0.0,
        draft_depth: int = 1,
    ) -> LatencyProfile:
        """Fit a profile to passes measured on this machine.

        Args:
            models: loaded models.
            points: measured passes, at least one for each model.
            first_draft_extra: seconds that the first draft pass of a step takes beyond the others.
            draft_depth: number of draft passes in a step that the draft's points are means over.
        """
        points = tuple(points)
        stages = {point.stage for point in points}
        costs = {
            stage: fit_stage([point for point in points if point.stage is stage])
            for stage in Stage
            if stage in stages
        }
        if Stage.DRAFT in costs:
            costs[Stage.DRAFT] = costs[Stage.DRAFT].split(first_draft_extra, draft_depth)
        described = {role: _describe(model) for role, model in _present(models).items()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(_this_machine(models.target), described, points, costs, {}, created)

    def latency_model(self) -> LatencyModel:
        """Return a latency model of the fitted costs, which live steps can correct."""
        interference = None
        if self.interference.keys() >= {Stage.TARGET, Stage.DRAFT}:
            interference = Interference(
                self.interference[Stage.TARGET], self.interference[Stage.DRAFT]
            )
        return LatencyModel(
            self.costs[Stage.TARGET],
            self.costs.get(Stage.DRAFT),
            self.costs.get(Stage.COMPANION),
            interference,
        )

    def save(self, path: str | Path) -> None:
        """Write the profile to a file.

        Raises:
            InvalidParameterError: the file cannot be written.
        """
        content = {
            "format": _FORMAT,
            "created": self.created,
            "machine": dict(self.machine),
            "models": {role: dict(model) for role, model in self.models.items()},
            "fit": {stage.value: cost.to_dict() for stage, cost in self.costs.items()},
            "interference": {stage.value: factor for stage, factor in self.interference.items()},
            "measured": [point.to_dict() for point in self.points],
        }
        try:
            Path(path).write_text(_readable(content) + "\n")
        except OSError as error:
            raise InvalidParameterError("output", f"cannot write {str(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> LatencyProfile:
        """Read a profile from a file.

        Raises:
            InvalidParameterError: the file does not exist, or it is not a latency profile.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise InvalidParameterError(
                "latency_profile", f"cannot read {str(path)!r}: {error.strerror or error}"
            ) from error
        except ValueError as error:
            raise _invalid_file(path, str(error)) from error
        if not isinstance(content, dict) or "format" not in content:
            raise _invalid_file(path, "it has no format field")
        if content["format"] != _FORMAT:
            raise _invalid_file(
                path, f"its format is {content['format']!r}, supported is {_FORMAT}"
            )
        try:
            profile = cls(
                machine={name: content["machine"][name] for name in (*_MUST_MATCH, "torch")},
                models={role: _model_entry(each) for role, each in content["models"].items()},
                points=tuple(Point.from_dict(values) for values in content["measured"]),
                costs={
                    Stage(name): StageCost.from_dict(values)
                    for name, values in content["fit"].items()
                },
                interference={
                    Stage(name): float(factor) for name, factor in content["interference"].items()
                },
                created=str(content["created"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _invalid_file(path, f"{type(error).__name__}: {error}") from error
        measured = {point.stage for point in profile.points}
        if Stage.TARGET not in profile.costs or not measured >= profile.costs.keys():
            raise _invalid_file(
                path, "measured passes of the target or of a fitted stage are missing"
            )
        return profile

    def check(self, models: Models) -> None:
        """Check that the profile was measured with these models on this machine.

        Args:
            models: models to use the profile with.

        Raises:
            InvalidParameterError: names the difference.
        """
        here = _this_machine(models.target)
        for name, called in _MUST_MATCH.items():
            if self.machine[name] != here[name]:
                raise _mismatch(f"{called} {self.machine[name]!r}, here it is {here[name]!r}")
        for role, model in _present(models).items():
            if role not in self.models or Stage(role) not in self.costs:
                raise _mismatch(f"no {role}, here it is {model.name!r}")
            then, now = self.models[role], _describe(model)
            for name in ("fingerprint", "dtype"):
                if then[name] != now[name]:
                    raise _mismatch(
                        f"another {role}: {then['name']!r} ({name} {then[name]}), here it is "
                        f"{now['name']!r} ({name} {now[name]})"
                    )

    def command(self, path: str | Path) -> str:
        """The command that repeats the measurement."""
        words = ["draftwise", "profile-latency"]
        names = {role: str(model["name"]) for role, model in self.models.items()}
        if "draft" in names and names.get("companion", "").startswith(f"{names['draft']}:"):
            names["companion"] = "draft" + names["companion"].removeprefix(names["draft"])
        for role, name in {"draft": "none", **names}.items():
            words += [f"--{role}", name]
        # Models of different data types were loaded with "auto".
        dtypes = {str(model["dtype"]) for model in self.models.values()}
        words += ["--dtype", dtypes.pop() if len(dtypes) == 1 else "auto"]
        for name in ("device", "threads"):
            words += [f"--{name}", str(self.machine[name])]
        shapes = [point.shape for point in self.points if point.stage is Stage.TARGET]
        contexts = sorted({shape.context for shape in shapes})
        words += ["--max-batch-size", str(max(shape.num_requests for shape in shapes))]
        words += ["--contexts", ",".join(str(context) for context in contexts)]
        most = max(-(-shape.num_tokens // shape.num_requests) for shape in shapes) - 1
        words += ["--num-speculative-tokens", str(most)]
        if self.interference:
            words.append("--interference")
        words += ["-o", str(path)]
        return shlex.join(words)


def fit_stage(points: Sequence[Point]) -> StageCost:
    """Fit a cost curve to the measured passes of one stage, by least squares of relative errors.

    Time is f(tokens) + a·(context summed over requests), with f non-decreasing and a ≥ 0. One
    least-squares problem over non-negative increments solves for f (isotonic regression) and a. If
    all passes of the stage had the same context, its cost is part of f and a is 0.

    Args:
        points: measured passes of one stage, at least one.
    """
    tokens = np.array([point.shape.num_tokens for point in points], dtype=float)
    context = np.array([point.shape.num_requests * point.shape.context for point in points])
    seconds = np.array([point.seconds for point in points])
    knots = np.unique(tokens)
    columns = (tokens[:, None] >= knots).astype(float)
    if len({point.shape.context for point in points}) > 1:
        columns = np.column_stack([columns, context])
    scale = columns.max(axis=0)
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones(len(points)))
    solution = solution / scale
    curve = np.cumsum(solution[: len(knots)])
    per_context_token = float(solution[len(knots)]) if len(solution) > len(knots) else 0.0
    return StageCost(
        tuple(float(knot) for knot in knots), tuple(float(s) for s in curve), per_context_token
    )


def _present(models: Models) -> dict[str, LoadedModel]:
    roles = {"target": models.target, "draft": models.draft, "companion": models.companion}
    return {role: model for role, model in roles.items() if model is not None}


def _describe(model: LoadedModel) -> dict[str, str | int]:
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "dtype": _name(model.model.dtype),
        "num_parameters": model.num_parameters,
    }


def _model_entry(values: Mapping[str, Any]) -> dict[str, str | int]:
    return {name: values[name] for name in ("name", "fingerprint", "dtype", "num_parameters")}


def _this_machine(target: LoadedModel) -> dict[str, str | int]:
    device = target.model.device
    return {
        "device": device.type,
        "processor": _processor(device),
        "threads": torch.get_num_threads(),
        "dtype": _name(target.model.dtype),
        "torch": torch.__version__,
    }


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _invalid_file(path: str | Path, reason: str) -> InvalidParameterError:
    return InvalidParameterError(
        "latency_profile",
        f"{str(path)!r} is not a latency profile ({reason}); make one with `draftwise "
        "profile-latency`",
    )


def _mismatch(difference: str) -> InvalidParameterError:
    return InvalidParameterError(
        "latency_profile",
        f"it was measured with {difference}; make a new one with `draftwise profile-latency`, or "
        "omit it to measure pass times when the models are loaded",
    )


def _readable(content: dict[str, Any]) -> str:
    """JSON with one line per list of numbers and per measured pass."""
    measured = ",\n".join(f"    {json.dumps(point)}" for point in content.pop("measured"))
    head = json.dumps(content, indent=2)
    head = re.sub(r"\[\n[^][{}\"]*\]", lambda found: " ".join(found[0].split()), head)
    return f'{head[:-2]},\n  "measured": [\n{measured}\n  ]\n}}'
