"""Presets of ``draftwise benchmark``."""

from pathlib import Path

import pytest
import typer

from draftwise.cli.app import app
from draftwise.cli.presets import PRESETS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text()
OPTIONS = {
    option.name: max(option.opts, key=len)
    for option in typer.main.get_command(app).commands["benchmark"].params
}


@pytest.mark.parametrize("name", PRESETS)
def test_options_exist_and_are_documented(name):
    assert f"preset `{name}`" in DOCUMENT
    for option, value in PRESETS[name].items():
        flag = OPTIONS[option]
        assert (flag if value is True else f"{flag} {value}") in DOCUMENT
