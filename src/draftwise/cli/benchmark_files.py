"""What ``draftwise benchmark`` writes."""

from __future__ import annotations

import json
import resource
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
    """All models of ours that take part, by role."""
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
    """Where figures come from: command, machine, models, contenders.

    Args:
        started: date.
        settings: of the command, by the names of its options.
        llm: with the target.
        contenders: that took part.
    """
    from draftwise.benchmark.report import provenance

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _is_mac() else 1024)
    return {
        "started": started,
        "command": " ".join(["draftwise", *sys.argv[1:]]),
        **provenance(settings),
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
        "peak_memory_gib": peak / _GIB,
    }


def _portable(value: Any) -> Any:
    """Of files only their names: where they lie is no property of a result."""
    if isinstance(value, list):
        return [_portable(each) for each in value]
    return value.name if isinstance(value, Path) else value


def _is_mac() -> bool:
    return sys.platform == "darwin"


def write_files(output: Path, report: Mapping[str, Any]) -> None:
    """``results.json``, and the page of it.

    Raises:
        InvalidParameterError: what draws the page is not installed.
    """
    text = json.dumps(report, indent=2, default=str)
    (output / "results.json").write_text(text + "\n", encoding="utf-8")
    try:
        from draftwise.benchmark.page import write_page
    except ImportError as error:
        raise InvalidParameterError(
            "output",
            f"results.json is written; for report.html install draftwise[bench] ({error})",
        ) from None
    write_page(output / "report.html", json.loads(text))
