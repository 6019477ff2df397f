"""Printed tables of ``draftwise benchmark``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwise.benchmark.titles import title_of

if TYPE_CHECKING:
    from draftwise.benchmark.comparison import Change


def results_table(title: str) -> Table:
    """A table of results without columns."""
    return Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def show_cell(console: Console, cell: dict[str, Any]) -> None:
    """Print the results of one workload and batch size, with a row for each contender."""
    table = results_table(title_of(cell))
    # Long names are broken, so that all numbers fit into a narrow terminal.
    table.add_column("contender", overflow="fold")
    for head in ("tokens/s", "× none", "range", "per step", "step ms", "repeated", "same"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, own in cell["contenders"].items():
        if "tokens_per_second" not in own:
            continue
        ratio, steps = own["ratio"], ["", ""]
        if "step_seconds" in own:
            steps = [f"{own['accepted_length']:.2f}", f"{1e3 * own['step_seconds']:.1f}"]
        table.add_row(
            name,
            f"{own['tokens_per_second']['median']:.1f}",
            f"{ratio['median']:.2f}" if ratio else "",
            f"[dim]{ratio['low']:.2f}–{ratio['high']:.2f}[/]" if ratio else "",
            *steps,
            f"{own['repeated_share']:.0%}",
            f"{own['identical_answers']}/{own['answers']}" if "answers" in own else "",
        )
    console.print(table)
    for name, own in cell["contenders"].items():
        if own.get("error"):
            console.print(f"[red]{name} failed:[/] {own['error']}", soft_wrap=True)
    for name, why in cell["left_out"].items():
        console.print(f"{name} is left out: it {why}", soft_wrap=True)


def show_changes(console: Console, found: list[Change], other_settings: list[str]) -> None:
    """Print results that are significantly slower or faster than in an earlier report.

    Args:
        console: console to print to.
        found: changes of all results in common.
        other_settings: settings that differ from those of the earlier report.
    """
    for text in other_settings:
        console.print(f"[yellow]the earlier report has another {text}[/]", soft_wrap=True)
    if not found:
        console.print("no measurements in common with the earlier report")
        return
    clear = [change for change in found if change.is_clear]
    slower = [change for change in clear if change.ratio < 1]
    console.print(
        f"{len(slower)} of {len(found)} measurements are slower, {len(clear) - len(slower)} are "
        "faster; the others differ by less than their spread"
    )
    for change in clear:
        colour = "red" if change.ratio < 1 else "green"
        console.print(
            f"  [{colour}]{change.ratio - 1:+.0%}[/] {change.contender}, {change.cell}: "
            f"{change.before:.2f} → {change.after:.2f}"
        )
