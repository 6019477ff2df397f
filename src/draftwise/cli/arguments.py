"""The command line as it is written to reports."""

from __future__ import annotations

import shlex
import sys

_KEY = "--api-key"


def shown_command() -> str:
    """The command line that runs, without the key."""
    arguments = list(sys.argv[1:])
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{_KEY}="):
            arguments[index] = f"{_KEY}=…"
        elif argument == _KEY and index + 1 < len(arguments):
            arguments[index + 1] = "…"
    return shlex.join(["draftwise", *arguments])
