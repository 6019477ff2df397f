"""What a study leaves: data, pictures, words, and a page of them all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from jinja2 import Environment, PackageLoader, select_autoescape

from draftwise.benchmark.report import provenance
from draftwise.benchmark.style import STYLE, svg
from draftwise.errors import InvalidParameterError
from draftwise.studies.registry import STUDIES, study_class
from draftwise.studies.settings import StudySettings
from draftwise.studies.study import Account, Study

DATA, PICTURE, WORDS, PAGE = "data.json", "figure", "text.md", "report.html"
_RESOLUTION = 150


def write_study(
    folder: Path, study: Study, measured: Mapping[str, Any], about: Mapping[str, Any]
) -> Account:
    """Write ``data.json``, ``figure.svg``, ``figure.png`` and ``text.md``.

    Args:
        folder: made if it is not there.
        study: that measured.
        measured: what it measured.
        about: settings, revision and machine, and how long it took.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # As a reader of the file will see it: whole numbers for keys become text.
    data = json.loads(json.dumps(_plain(measured)))
    account = study.tell(data)
    content = {
        "study": study.name,
        "title": study.title,
        "source": study.source,
        **about,
        "text": account.text,
        "findings": [asdict(finding) for finding in account.findings],
        "data": data,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / DATA).write_text(text + "\n", encoding="utf-8")
    (folder / WORDS).write_text(words(study, account), encoding="utf-8")
    with plt.rc_context(STYLE):
        figure = study.draw(data)
        for kind in ("svg", "png"):
            figure.savefig(
                folder / f"{PICTURE}.{kind}",
                dpi=_RESOLUTION,
                bbox_inches="tight",
                metadata={"Date": None} if kind == "svg" else None,
            )
    plt.close(figure)
    return account


def redraw(folder: Path, names: Sequence[str]) -> None:
    """Write pictures and words anew from the data of an earlier run.

    Raises:
        InvalidParameterError: there is none of such a study.
    """
    for name in names:
        content = read(folder / name)
        told = {"study", "title", "source", "text", "findings", "data"}
        about = {key: value for key, value in content.items() if key not in told}
        write_study(folder / name, study_class(name)(), content["data"], about)


def read(folder: Path) -> dict[str, Any]:
    """What a study wrote.

    Raises:
        InvalidParameterError: there is no such file, or it is none of a study.
    """
    path = folder / DATA
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidParameterError("output", f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, dict) or content.get("study") not in STUDIES:
        raise InvalidParameterError("output", f"{str(path)!r} is no result of a study")
    return content


def about(settings: StudySettings, seconds: float, command: str) -> dict[str, Any]:
    """Where a result comes from."""
    return provenance({}) | {
        "settings": settings.to_dict(),
        "command": command,
        "seconds": round(seconds, 1),
    }


def words(study: Study, account: Account) -> str:
    """The paragraph and the findings as Markdown."""
    lines = [f"# {study.title}", "", f"After {study.source}.", "", account.text, ""]
    if account.findings:
        lines += ["| the source | here | |", "|---|---|---|"]
        lines += [f"| {f.source} | {f.ours} | {f.verdict} |" for f in account.findings]
        lines.append("")
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """One page of all studies whose results lie in a folder.

    Raises:
        InvalidParameterError: there are none.
    """
    results = [read(folder / name) for name in STUDIES if (folder / name / DATA).is_file()]
    if not results:
        raise InvalidParameterError("output", f"{str(folder)!r} holds no results of studies")
    with plt.rc_context(STYLE):
        pictures = [svg(study_class(each["study"])().draw(each["data"])) for each in results]
    environment = Environment(
        loader=PackageLoader("draftwise.studies", "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(
        results=list(zip(results, pictures, strict=True)),
        timed={name for name, study in STUDIES.items() if study.timed},
    )
    path = folder / PAGE
    path.write_text(page, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers that are none become ``null``, long ones short."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
