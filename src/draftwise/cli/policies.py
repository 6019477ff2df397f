"""``draftwise policies``: list the available policies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from draftwise.policies import Policy

_NEEDS = ("draft", "companion", "profile", "latency")


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the policies, which decide how many tokens to draft and to verify."""
    from draftwise.policies import POLICIES

    rows = [_describe(policy) for policy in POLICIES.values()]
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
    else:
        _show(Console(highlight=False), rows)


def _describe(policy: type[Policy]) -> dict[str, Any]:
    """A policy as a JSON-serialisable object; signals in the order of their definition."""
    from draftwise.policies import Signal
    from draftwise.policies.catalogue import options_of

    return {
        "name": policy.name,
        "summary": policy.summary,
        "source": policy.source,
        "signals": [signal.value for signal in Signal if signal in policy.signals],
        "lossless": policy.lossless,
        "options": options_of(policy),
        "needs": [need for need in _NEEDS if getattr(policy, f"needs_{need}")],
    }


def _show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print signals and requirements of each policy, then summaries, sources and options."""
    facts = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("policy", "signals", "lossless", "needs"):
        facts.add_column(column, style="bold" if column == "policy" else "", no_wrap=True)
    texts = Table(box=None, pad_edge=False, show_header=False)
    texts.add_column(style="bold", no_wrap=True)
    texts.add_column()
    for row in rows:
        facts.add_row(
            row["name"],
            " ".join(row["signals"]) or "–",
            "[green]yes[/]" if row["lossless"] else "[yellow]greedy only[/]",
            " ".join(row["needs"]) or "–",
        )
        options = ", ".join(f"{key} = {value}" for key, value in row["options"].items())
        options_line = f"\n[dim]options: {options}[/]" if options else ""
        texts.add_row(row["name"], f"{row['summary']}\n[dim]{row['source']}[/]{options_line}")
    console.print(facts)
    console.print(
        "[dim]H: entropy of the draft distribution; q(x): draft probability of the token;\n"
        "S: similarity of draft and companion distributions; A: agreement of the companion "
        "with the token;\ntarget: output of the target[/]\n"
    )
    console.print(texts)
