"""The file of ``draftwise profile-latency``: what was measured, on what, and the fit."""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from draftwise.core.latency import LatencyModel, StageCost
from draftwise.engine.assembly import Models
from draftwise.errors import InvalidParameterError
from draftwise.models.loading import LoadedModel
from draftwise.profiling.fitting import Point, fit_stage
from draftwise.profiling.passes import Stage

_FORMAT = 1
# What a profile shares with the machine it is used on, and what a user calls it.
_SAME = {
    "device": "device",
    "processor": "processor",
    "threads": "number of threads",
    "dtype": "dtype",
}


@dataclass(frozen=True)
class LatencyProfile:
    """What passes of some models cost on some machine.

    Attributes:
        machine: processor, threads, device, type of the weights, version of PyTorch.
        models: name, fingerprint and number of parameters of each model, by role.
        points: what was measured.
        costs: the curve through it, by stage.
        interference: by stage, how many times as long a pass takes while another model runs beside
            it; empty where that was not measured.
        created: date and time, ISO 8601.
    """

    machine: Mapping[str, str | int]
    models: Mapping[str, Mapping[str, str | int]]
    points: tuple[Point, ...]
    costs: Mapping[Stage, StageCost]
    interference: Mapping[Stage, float] = field(default_factory=dict)
    created: str = ""

    @classmethod
    def of(cls, models: Models, points: Iterable[Point]) -> LatencyProfile:
        """Fit what was measured here and now.

        Args:
            models: loaded.
            points: at least one of each model's stage.
        """
        points = tuple(points)
        stages = {point.stage for point in points}
        costs = {
            stage: fit_stage([point for point in points if point.stage is stage])
            for stage in Stage
            if stage in stages
        }
        described = {role: _describe(model) for role, model in _present(models).items()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(_this_machine(models.target), described, points, costs, {}, created)

    def latency_model(self) -> LatencyModel:
        """To be asked, and corrected by live steps."""
        return LatencyModel(
            self.costs[Stage.TARGET],
            self.costs.get(Stage.DRAFT),
            self.costs.get(Stage.COMPANION),
        )

    def save(self, path: str | Path) -> None:
        """Write a file.

        Raises:
            InvalidParameterError: it cannot be written.
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
        """Read a file.

        Raises:
            InvalidParameterError: there is none, or it is not a latency profile.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise InvalidParameterError(
                "latency_profile", f"cannot read {str(path)!r}: {error.strerror or error}"
            ) from error
        except ValueError as error:
            raise _not_one(path, str(error)) from error
        if not isinstance(content, dict) or "format" not in content:
            raise _not_one(path, "it names no format")
        if content["format"] != _FORMAT:
            raise _not_one(path, f"its format is {content['format']!r}, known is {_FORMAT}")
        try:
            profile = cls(
                machine={name: content["machine"][name] for name in (*_SAME, "torch")},
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
            raise _not_one(path, f"{type(error).__name__}: {error}") from error
        measured = {point.stage for point in profile.points}
        if Stage.TARGET not in profile.costs or not measured >= profile.costs.keys():
            raise _not_one(path, "passes of the target, or those behind a fit, are missing")
        return profile

    def check(self, models: Models) -> None:
        """Refuse a profile of something else.

        Args:
            models: what it is to be used with.

        Raises:
            InvalidParameterError: names what differs.
        """
        here = _this_machine(models.target)
        for name, called in _SAME.items():
            if self.machine[name] != here[name]:
                raise _other(f"{called} {self.machine[name]!r}, here it is {here[name]!r}")
        for role, model in _present(models).items():
            if role not in self.models or Stage(role) not in self.costs:
                raise _other(f"no {role}, here it is {model.name!r}")
            then, now = self.models[role], _describe(model)
            for name in ("fingerprint", "dtype"):
                if then[name] != now[name]:
                    raise _other(
                        f"another {role}: {then['name']!r} ({name} {then[name]}), here it is "
                        f"{now['name']!r} ({name} {now[name]})"
                    )

    def command(self, path: str | Path) -> str:
        """The command that measures the same again."""
        words = ["draftwise", "profile-latency"]
        names = {role: str(model["name"]) for role, model in self.models.items()}
        if "draft" in names and names.get("companion", "").startswith(f"{names['draft']}:"):
            names["companion"] = "draft" + names["companion"].removeprefix(names["draft"])
        for role, name in {"draft": "none", **names}.items():
            words += [f"--{role}", name]
        for name in ("dtype", "device", "threads"):
            words += [f"--{name}", str(self.machine[name])]
        shapes = [point.shape for point in self.points if point.stage is Stage.TARGET]
        contexts = sorted({shape.context for shape in shapes})
        words += ["--max-batch-size", str(max(shape.num_requests for shape in shapes))]
        words += ["--contexts", ",".join(str(context) for context in contexts)]
        most = max(-(-shape.num_tokens // shape.num_requests) for shape in shapes) - 1
        words += ["--num-speculative-tokens", str(most), "-o", str(path)]
        return shlex.join(words)


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


def _not_one(path: str | Path, reason: str) -> InvalidParameterError:
    return InvalidParameterError(
        "latency_profile",
        f"{str(path)!r} is no latency profile ({reason}); make one with draftwise profile-latency",
    )


def _other(difference: str) -> InvalidParameterError:
    return InvalidParameterError(
        "latency_profile",
        f"it was measured with {difference}; make one with draftwise profile-latency, or leave it "
        "out and passes are measured when the models are loaded",
    )


def _readable(content: dict[str, Any]) -> str:
    """JSON with one line per list of numbers and per measured pass."""
    measured = ",\n".join(f"    {json.dumps(point)}" for point in content.pop("measured"))
    head = json.dumps(content, indent=2)
    head = re.sub(r"\[\n[^][{}\"]*\]", lambda found: " ".join(found[0].split()), head)
    return f'{head[:-2]},\n  "measured": [\n{measured}\n  ]\n}}'
