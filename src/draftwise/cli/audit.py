"""``draftwise audit``: whether a server with speculation says what the model says without it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from draftwise.audit.settings import CHECKS, SAMPLING, AuditSettings
from draftwise.cli.arguments import shown_command
from draftwise.cli.fields import Group, Own, Values, takes
from draftwise.cli.option_values import make_folder
from draftwise.cli.options import LOADING_OPTIONS
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.audit.findings import Case
    from draftwise.audit.run import Audit
    from draftwise.audit.run import Progress as OnProgress

_BASELINE, _WORK, _SERVER = "Baseline", "Work", "Server"
_MODEL_PANEL = "The baseline's model"
_STYLES = {"passed": "green", "failed": "bold red", "noted": "yellow", "not audited": "dim"}
_STATUSES = {"passed": 0, "failed": 1, "not audited": 2}


def _parse_off(text: str) -> dict[str, Any]:
    fields: object = None
    with suppress(ValueError):
        fields = json.loads(text)
    if not isinstance(fields, dict):
        raise InvalidParameterError("off", f"must be a JSON object, got {text!r}")
    return fields


def _parse_checks(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


AUDIT_OPTIONS = Group(
    AuditSettings,
    _WORK,
    {
        "baseline": Own(metavar="URL", panel=_BASELINE),
        "baseline_model": Own(panel=_BASELINE),
        "off": Own(kind=str, parse=_parse_off, metavar="JSON", panel=_BASELINE),
        "model": Own(panel=_SERVER),
        "chat": Own(panel=_SERVER),
        "allow_hosts": Own(flag="--allow-host", kind=list[str], metavar="NAME", panel=_SERVER),
        "api_key": Own(envvar="DRAFTWISE_API_KEY", panel=_SERVER),
        "checks": Own("Kinds of checks, separated by commas.", kind=str, parse=_parse_checks),
        "prompts": Own(metavar="FILE"),
        "num_prompts": Own(),
        "max_tokens": Own(),
        "requests": Own(),
        "minutes": Own(),
        "bias": Own(),
        "concurrency": Own(),
    },
    {"checks": ",".join(CHECKS)},
)


@takes(settings=AUDIT_OPTIONS, loading=replace(LOADING_OPTIONS, panel=_MODEL_PANEL))
def audit(
    url: Annotated[
        str, typer.Argument(help="Address of the server with speculation.", metavar="URL")
    ],
    *,
    settings: Values,
    loading: Values,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report.", metavar="DIR")
    ] = Path("audit"),
) -> None:
    """Check that a server with speculation says what its model says without speculation.

    Works with every OpenAI-compatible server: Draftwise, vLLM, llama.cpp, SGLang, TGI, ollama. It
    compares greedy answers, tests sampled answers against their exact distribution, and checks
    stop strings, limits, counts, streams and more. Writes audit.json and audit.html. The exit
    status is 0 if the server passed, 1 if it failed and 2 if it could not be audited.

    Examples:
      draftwise audit http://127.0.0.1:8000
      draftwise audit http://127.0.0.1:8000 --baseline http://127.0.0.1:8001
      draftwise audit http://127.0.0.1:8000 --baseline-model TARGET --dtype float32
    """
    try:
        from draftwise.audit.report import report_of, write_audit
        from draftwise.audit.run import audit as run
    except ModuleNotFoundError as error:
        raise InvalidParameterError(
            "audit", f"{error.name} is missing: pip install 'draftwise[audit]'"
        ) from error
    chosen = AuditSettings(url=url, **settings)
    make_folder(output)
    console = Console(highlight=False)
    with _progress(chosen) as on_progress:
        result = run(chosen, on_progress, loading)
    write_audit(output, report_of(result, shown_command()))
    show(console, result)
    files = f"written to {output}{os.sep}audit.json and audit.html"
    console.print(files, soft_wrap=True, markup=False)
    raise typer.Exit(_STATUSES[result.status.value])


def show(console: Console, audit: Audit) -> None:
    """Print the result of an audit as a table, with the smallest cases below."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("check", "result", "detail"):
        table.add_column(heading)
    for finding in audit.findings:
        status = finding.status.value
        table.add_row(finding.check, Text(status, style=_STYLES[status]), Text(finding.detail))
    console.print(table)
    console.print()
    for line in _remarks(audit):
        console.print(line, markup=False)
    failures = [finding for finding in audit.findings if finding.case is not None]
    sampled = [finding for finding in failures if finding.check.startswith(SAMPLING)]
    for finding in failures:
        # One case of the sampling is enough here.
        if finding.case is not None and finding not in sampled[1:]:
            console.print(f"\n[bold]{finding.check}[/], the smallest case:")
            _show_case(console, finding.case)
    status = audit.status.value
    console.print(
        Text.assemble(
            "\n",
            (status, _STYLES[status]),
            f": {audit.model} at {audit.settings.url} ({audit.engine}), against {audit.baseline}; "
            f"{audit.num_answers:,} answers in {audit.seconds:.0f} s",
        ),
        soft_wrap=True,
    )


def _remarks(audit: Audit) -> Iterator[str]:
    if audit.missing:
        yield f"Not audited, as not both servers have it: {', '.join(audit.missing)}."
    if audit.drafts is None:
        yield "The server does not say how many tokens it drafted."
    elif not audit.drafts[0]:
        yield "The server drafted no token: this audit says nothing of its speculation."
    else:
        drafted, accepted = audit.drafts
        yield f"{drafted:,} drafted tokens were verified, {accepted:,} accepted."
    power = "" if audit.sampled is None else audit.sampled.power(audit.settings.bias)
    if power:
        yield power


def _show_case(console: Console, case: Case) -> None:
    for command in case.commands:
        console.print(f"  $ {command}", soft_wrap=True, markup=False)
    console.print(f"  expected {case.expected}", soft_wrap=True, markup=False)
    console.print(f"  found    {case.found}", soft_wrap=True, markup=False)


@contextmanager
def _progress(settings: AuditSettings) -> Iterator[OnProgress]:
    """Show a bar over the answers, on standard error; yields what the audit reports to."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of at most {task.total} answers"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("connecting", total=settings.requests)
        yield lambda what, num_answers: bar.update(task, description=what, completed=num_answers)
