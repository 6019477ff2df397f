"""Printed tables of ``draftwise benchmark``."""

import pytest
from rich.console import Console

from draftwise.cli.benchmark_tables import show_cell


@pytest.mark.parametrize("name", ["fixed:3", "adaptive@a-head-with-a-very-long-name-indeed"])
def test_a_narrow_terminal_shows_every_number(name, capsys):
    """Long names are broken into lines, and numbers and headings are not cut."""
    own = {
        "tokens_per_second": {"median": 1234.5, "low": 1, "high": 2},
        "ratio": {"median": 2.345, "low": 2.125, "high": 2.515},
        "step_seconds": 0.0123,
        "accepted_length": 4.56,
        "repeated_share": 0.78,
        "answers": 12,
        "identical_answers": 11,
    }
    cell = {
        "workload": "questions",
        "batch_size": 8,
        "temperature": 0.0,
        "prompts": 12,
        "rounds": 4,
        "contenders": {name: own},
        "left_out": {},
    }
    show_cell(Console(width=80), cell)
    out = capsys.readouterr().out
    assert "…" not in out
    for text in ("1234.5", "2.35", "2.12", "4.56", "12.3", "78%", "11/12", "step ms", "repeated"):
        assert text in out
    shown = "".join(line.split("  ")[0].strip() for line in out.splitlines())
    assert name in shown
