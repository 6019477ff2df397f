"""Printed tables of ``draftwise benchmark --server``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from draftwise.benchmark.titles import title_of
from draftwise.cli.benchmark_tables import results_table

Json = Mapping[str, Any]
_TIMES = ("TTFT ms\n50/90/99%", "ms/token\n50/90/99%")


def show_contenders(console: Console, about: Json) -> None:
    """Print the servers, and a command that repeats a request of each contender.

    Args:
        console: console to print to.
        about: what the report says of the servers and contenders.
    """
    for server in about["servers"]:
        version = f" {server['version']}" if server["version"] else ""
        line = (
            f"{server['name']}: {server['engine']}{version} at {server['url']}, {server['model']}"
        )
        console.print(line, soft_wrap=True, markup=False)
    for name, command in about["commands"].items():
        console.print(f"{name}:\n  $ {command}", soft_wrap=True, markup=False)
        missing = about["contenders"][name]["not_taken"]
        if missing:
            text = f"  does not take {', '.join(missing)}: its work may differ from the others'"
            console.print(Text(text, style="yellow"), soft_wrap=True)


def show_server_cell(console: Console, cell: Json) -> None:
    """Print the results of one cell, with a row for each contender, and one for each category."""
    table = results_table(title_of(cell))
    table.add_column("contender", overflow="fold")
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column(Text(f"× {cell['baseline']}"), justify="right", overflow="fold")
    for head in ("range", *_TIMES, "accepted", "per step", "repeated"):
        table.add_column(head, justify="right", no_wrap=True)
    fixed = cell["best_fixed"].values()
    for name, own in cell["contenders"].items():
        if "tokens_per_second" not in own:
            continue
        ratio, by_drafts = own["ratio"], ["", ""]
        if "acceptance_rate" in own:
            by_drafts = [f"{own['acceptance_rate']:.0%}", f"{own['accepted_length']:.2f}"]
        table.add_row(
            Text(f"{name} (best fixed)" if name in fixed else name),
            f"{own['tokens_per_second']['median']:.1f}",
            _ratio(ratio),
            f"{ratio['low']:.2f}–{ratio['high']:.2f}" if ratio else "",
            _percentiles(own["ttft_ms"]),
            _percentiles(own["tpot_ms"]),
            *by_drafts,
            f"{own['repeated_share']:.0%}",
        )
    console.print(table)
    for name, own in cell["contenders"].items():
        for text in _remarks(name, own):
            console.print(Text(text, style="yellow"), soft_wrap=True)
    if len(_categories(cell)) > 1 and len(cell["contenders"]) > 1:
        _show_categories(console, cell)


def show_slower(console: Console, losing: Sequence[Json], cells: Sequence[Json]) -> None:
    """Print the cells in which contenders were slower than the first.

    Args:
        console: console to print to.
        losing: these cells, with contender and ratio.
        cells: all cells.
    """
    total = sum(len(cell["contenders"]) - 1 for cell in cells)
    if not total:
        return
    console.print(
        f"{len(losing)} of {total} results are slower than {cells[0]['baseline']}", markup=False
    )
    for each in losing:
        text = f"  {each['contender']}, {title_of(each)}: "
        ratio = "failed" if not each["ratio"] else f"{each['ratio']:.2f}"
        console.print(Text.assemble(text, (ratio, "red")), soft_wrap=True)


def _show_categories(console: Console, cell: Json) -> None:
    """Print the speed of answers by category: the ratio of ms/token, and the acceptance rate."""
    shown = [name for name in cell["contenders"] if name != cell["baseline"]]
    table = results_table(
        f"{title_of(cell)}: ms/token of {cell['baseline']} over that of …, and accepted"
    )
    table.add_column("category")
    for name in shown:
        table.add_column(Text(name), justify="right", overflow="fold")
    for category in _categories(cell):
        row = []
        for name in shown:
            own = cell["contenders"][name].get("categories", {}).get(category, {})
            rate = own.get("acceptance_rate")
            accepted = "" if rate is None else f" {rate:.0%}"
            median = own.get("ratio")
            row.append(Text.assemble(_ratio(median and {"median": median}), accepted))
        table.add_row(Text(category), *row)
    console.print(table)


def _categories(cell: Json) -> list[str]:
    found = dict.fromkeys(
        name for own in cell["contenders"].values() for name in own.get("categories", ())
    )
    return list(found)


def _remarks(name: str, own: Json) -> list[str]:
    found = []
    if own.get("error"):
        found.append(f"{name} failed: {own['error']}")
    if own.get("failed_requests"):
        found.append(f"{name}: {own['failed_requests']} of {own['requests']} requests failed")
    if own.get("refusals"):
        found.append(f"{name}: {own['refusals']} requests waited, as the server had no room")
    if own.get("counts_chunks"):
        found.append(f"{name} counts no tokens: its figures count chunks, which may have several")
    return found


def _ratio(ratio: Json | None) -> Text:
    if not ratio:
        return Text("")
    return Text(f"{ratio['median']:.2f}", style="red" if ratio["median"] < 1 else "")


def _percentiles(values: Json) -> str:
    """Median and percentiles, with three digits."""
    return "/".join(f"{each:.3g}" if each < 1000 else f"{each:.0f}" for each in values.values())
