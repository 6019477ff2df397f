"""Output files of ``draftwise benchmark``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.benchmark.contenders import Contender
    from draftwise.llm import LLM
    from draftwise.models.loading import LoadedModel

_GIB = 2**30


def models_of(llm: LLM, contenders: Sequence[Contender]) -> dict[str, LoadedModel]:
    """All models loaded by Draftwise, by role."""
    from draftwise.benchmark.contenders import PolicyContender

    models = {"target": llm.target}
    for contender in contenders:
        if isinstance(contender, PolicyContender):
            for role in ("draft", "companion"):
                model = getattr(contender.llm, role)
                if model is not None:
                    models[role] = model
    return models


def report_of(
    started: str, settings: Mapping[str, Any], llm: LLM, contenders: Sequence[Contender]
) -> dict[str, Any]:
    """Provenance of the results: command, machine, models and contenders.

    Args:
        started: date of the run.
        settings: values of the options of the command by name.
        llm: the loaded target.
        contenders: the contenders that were measured.
    """
    from draftwise.benchmark.report import provenance

    return {
        "started": started,
        "command": " ".join(["draftwise", *sys.argv[1:]]),
        **provenance({}),
        "settings": {name: _portable(value) for name, value in settings.items()},
        "models": {
            role: {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "parameters": model.num_parameters,
            }
            for role, model in models_of(llm, contenders).items()
        },
        "contenders": {each.name: each.describe() for each in contenders},
        # A training in the same process would count too.
        "peak_memory_gib": None if settings.get("train_on") else _peak_memory_gib(),
    }


def _portable(value: Any) -> Any:
    """Reduce paths to file names, as folders differ between machines."""
    if isinstance(value, list):
        return [_portable(each) for each in value]
    return value.name if isinstance(value, Path) else value


def _peak_memory_gib() -> float | None:
    """The most memory that this process had; ``None`` where the system does not say, on Windows."""
    try:
        import resource  # does not exist on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB


def write_results(output: Path, report: Mapping[str, Any]) -> str:
    """Replace ``results.json``; returns its text."""
    text = json.dumps(report, indent=2, default=str)
    unfinished = output / "results.json.part"
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(output / "results.json")
    return text


def write_files(output: Path, report: Mapping[str, Any]) -> None:
    """Write ``results.json`` and ``report.html``.

    Raises:
        InvalidParameterError: the packages that draw the report are not installed.
    """
    text = write_results(output, report)
    try:
        from draftwise.benchmark.page import write_page
    except ImportError as error:
        raise InvalidParameterError(
            "output",
            f"results.json is written; for report.html install draftwise[bench] ({error})",
        ) from None
    write_page(output / "report.html", json.loads(text))
