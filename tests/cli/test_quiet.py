"""Warnings shown by the command line."""

import os
import subprocess
import sys
import warnings

import pytest

from draftwise.cli.quiet import environment_of_the_user, only_our_warnings
from draftwise.errors import DraftwiseWarning

pytestmark = pytest.mark.slow


def test_draftwise_warnings_are_one_line_and_others_are_hidden(capsys):
    with only_our_warnings() as shown:
        warnings.warn("of a library", UserWarning, stacklevel=1)
        for _ in range(2):
            warnings.warn("profile: was made\n  elsewhere", DraftwiseWarning, stacklevel=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == 2 * "warning profile: was made elsewhere\n"
    assert shown == 2 * ["profile: was made elsewhere"]


def test_filters_are_restored():
    before = warnings.filters[:]
    with only_our_warnings():
        pass
    assert warnings.filters == before


def test_a_too_long_prompt_shows_only_our_error():
    """In a separate process, because transformers configures its warnings when it is imported."""
    command = "from draftwise.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", command, "generate", "word " * 3000, "--draft", "none"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    # Without a fast path for the model, a warning says so.
    lines = [line for line in done.stderr.splitlines() if "the fast path" not in line]
    (line,) = lines
    assert line.startswith("error prompt: has ")
    assert line.endswith("raise --max-model-len")


def test_the_verbosity_set_by_the_user_is_kept(monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    with only_our_warnings():
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert "TRANSFORMERS_VERBOSITY" not in os.environ
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    with only_our_warnings():
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"


def test_other_programs_do_not_inherit_the_verbosity(monkeypatch):
    monkeypatch.setenv("ANOTHER_VARIABLE", "x")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    with only_our_warnings():
        inherited = environment_of_the_user()
    assert "TRANSFORMERS_VERBOSITY" not in inherited
    assert inherited["ANOTHER_VARIABLE"] == "x"
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    with only_our_warnings():
        assert environment_of_the_user()["TRANSFORMERS_VERBOSITY"] == "info"
