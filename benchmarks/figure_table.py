"""Printed tables of the figures of :func:`draftwise.studies.sustained.summary`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

# A column's text, from the figures of one contender.
Column = Callable[[Mapping[str, Any]], str]

RELATIVE: dict[str, Column] = {
    "× none": lambda f: f"{f['ratio']:.3f}",
    "±": lambda f: f"{f['standard_error']:.3f}",
}


def per_step(kind: str) -> Column:
    """Tokens of one kind per step of a request."""
    return lambda f: f"{f[f'{kind}_per_request_step']:.2f}"


def figure_table(
    title: str, figures: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column]
) -> Table:
    """A table with a row for each contender."""
    table = Table(title=title)
    table.add_column("policy")
    for head in columns:
        table.add_column(head, justify="right")
    for name, own in figures.items():
        table.add_row(name, *(text(own) for text in columns.values()))
    return table
