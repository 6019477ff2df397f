"""Of all the warnings of a run, those that a user of the command should read."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from draftwise.errors import DraftwiseWarning

_VERBOSITY = "TRANSFORMERS_VERBOSITY"


@contextmanager
def only_our_warnings() -> Iterator[list[str]]:
    """Show each :class:`DraftwiseWarning` as one line on stderr, and silence everybody else.

    Yields:
        What was shown so far.
    """
    shown: list[str] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = " ".join(str(message).split())
        shown.append(text)
        print(f"warning {text}", file=sys.stderr)

    with _quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", DraftwiseWarning)
        warnings.showwarning = show
        yield shown


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Let the models' library, which talks to developers, report errors only.

    It sets the level of its logger when it is first imported, from this variable.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    given = os.environ.get(_VERBOSITY)
    if given is not None:
        yield
        return
    os.environ[_VERBOSITY] = "error"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]
