"""What ``draftwise benchmark`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from draftwise.benchmark.comparison import Change


def show_cell(console: Console, cell: dict[str, Any]) -> None:
    """One workload at one batch size, a line for each contender."""
    table = Table(title=f"{cell['workload']}, batch {cell['batch_size']}", title_justify="left")
    table.add_column("contender")
    for title in ("tokens/s", "× none", "tokens/step", "drafted", "verified", "step ms", "same"):
        table.add_column(title, justify="right")
    for name, own in cell["contenders"].items():
        if "tokens_per_second" not in own:
            table.add_row(name, f"[red]{own['error'][:60]}[/]")
            continue
        steps = ["", "", "", ""]
        if "step_seconds" in own:
            keys = ("accepted_length", "drafted_per_step", "verified_per_step")
            steps = [f"{own[key]:.2f}" for key in keys] + [f"{1e3 * own['step_seconds']:.1f}"]
        ratio = own["ratio"]
        spread = f" [dim]{ratio['low']:.2f}–{ratio['high']:.2f}[/]" if ratio else ""
        table.add_row(
            name,
            f"{own['tokens_per_second']['median']:.1f}",
            f"{ratio['median']:.2f}{spread}" if ratio else "",
            *steps,
            f"{own['identical_answers']}/{own['answers']}" if "answers" in own else "",
        )
    console.print(table)


def show_changes(console: Console, found: list[Change]) -> None:
    """What is clearly slower or faster than in an older report."""
    if not found:
        console.print("nothing in common with the older report")
        return
    clear = [change for change in found if change.is_clear]
    slower = [change for change in clear if change.ratio < 1]
    console.print(
        f"{len(slower)} of {len(found)} figures got slower, {len(clear) - len(slower)} faster; "
        "the others are within their spread"
    )
    for change in clear:
        colour = "red" if change.ratio < 1 else "green"
        console.print(
            f"  [{colour}]{change.ratio - 1:+.0%}[/] {change.contender}, {change.workload}, batch "
            f"{change.batch_size}: {change.before:.2f} → {change.after:.2f}"
        )
