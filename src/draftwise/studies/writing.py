"""Output files of studies: data, figures, text, and one page of all studies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from draftwise.benchmark.report import provenance
from draftwise.benchmark.style import STYLE, pyplot, svg
from draftwise.errors import InvalidParameterError
from draftwise.studies.catalogue import STUDIES, study_class
from draftwise.studies.settings import StudySettings
from draftwise.studies.study import Data, Description, Study

DATA, FIGURE, TEXT, PAGE = "data.json", "figure", "text.md", "report.html"
_RESOLUTION = 150
plt = pyplot()


def write_study(
    folder: Path, study: Study, measured: Mapping[str, Any], about: Mapping[str, Any]
) -> Description:
    """Write ``data.json``, ``figure.svg``, ``figure.png`` and ``text.md``.

    Args:
        folder: output folder, created if it does not exist.
        study: the study.
        measured: results of :meth:`Study.measure`.
        about: settings, revision, machine and duration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, description = describe(study, measured)
    content = {
        "study": study.name,
        "title": study.title,
        "source": study.source,
        **about,
        "text": description.text,
        "findings": [asdict(finding) for finding in description.findings],
        "data": data,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / DATA).write_text(text + "\n", encoding="utf-8")
    (folder / TEXT).write_text(markdown(study, description), encoding="utf-8")
    with plt.rc_context(STYLE):
        figure = study.draw(data)
        for kind in ("svg", "png"):
            figure.savefig(
                folder / f"{FIGURE}.{kind}",
                dpi=_RESOLUTION,
                bbox_inches="tight",
                metadata={"Date": None} if kind == "svg" else None,
            )
    plt.close(figure)
    return description


def describe(study: Study, measured: Mapping[str, Any]) -> tuple[Data, Description]:
    """The data of a study as it is written and read, and its description.

    Args:
        study: the study.
        measured: results of :meth:`Study.measure`.
    """
    # The same types as when the data is read from the file: JSON turns integer keys into strings.
    data = json.loads(json.dumps(_plain(measured)))
    return data, study.describe(data)


def redraw(folder: Path, names: Sequence[str]) -> None:
    """Rewrite the figures and texts of studies from the data of an earlier run.

    Raises:
        InvalidParameterError: a study has no data in the folder.
    """
    for name in names:
        content = read(folder / name)
        rewritten = {"study", "title", "source", "text", "findings", "data"}
        about = {key: value for key, value in content.items() if key not in rewritten}
        write_study(folder / name, study_class(name)(), content["data"], about)


def read(folder: Path) -> dict[str, Any]:
    """Read the data file of a study.

    Raises:
        InvalidParameterError: the file does not exist, or it is not the result of a study.
    """
    path = folder / DATA
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidParameterError("output", f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, dict) or content.get("study") not in STUDIES:
        raise InvalidParameterError("output", f"{str(path)!r} is not the result of a study")
    return content


def about(settings: StudySettings, seconds: float, command: str) -> dict[str, Any]:
    """Provenance of a result: settings, command, duration, revision and machine."""
    return provenance({}) | {
        "settings": settings.to_dict(),
        "command": command,
        "seconds": round(seconds, 1),
    }


def markdown(study: Study, description: Description) -> str:
    """Format the description of a study as Markdown."""
    lines = [f"# {study.title}", "", f"After {study.source}.", "", description.text, ""]
    if description.findings:
        lines += ["| source | measured here | verdict |", "|---|---|---|"]
        lines += [f"| {f.source} | {f.ours} | {f.verdict} |" for f in description.findings]
        lines.append("")
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """Write one HTML page of all studies whose results are in a folder.

    Raises:
        InvalidParameterError: the folder has no results.
    """
    results = [read(folder / name) for name in STUDIES if (folder / name / DATA).is_file()]
    if not results:
        raise InvalidParameterError("output", f"{str(folder)!r} contains no results of studies")
    with plt.rc_context(STYLE):
        figures = [svg(study_class(each["study"])().draw(each["data"])) for each in results]
    environment = Environment(
        loader=PackageLoader("draftwise.studies", "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(
        results=list(zip(results, figures, strict=True)),
        timed={name for name, study in STUDIES.items() if study.timed},
    )
    path = folder / PAGE
    path.write_text(page, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """Convert to JSON-compatible values: non-finite numbers become ``null``, others are rounded."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
