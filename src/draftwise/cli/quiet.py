"""Filter of warnings: only those of Draftwise are shown to users of the command line."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from draftwise.errors import DraftwiseWarning, SlowPathWarning, VocabularyWarning

_VERBOSITY = "TRANSFORMERS_VERBOSITY"
# The variables of the environment that were set here.
_set_here: set[str] = set()


def environment_of_the_user() -> dict[str, str]:
    """The environment variables, without those that only make this program quiet."""
    return {name: value for name, value in os.environ.items() if name not in _set_here}


def show_logs() -> None:
    """Show what Draftwise logs, as lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("draftwise")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


@contextmanager
def only_our_warnings() -> Iterator[list[str]]:
    """Show each :class:`DraftwiseWarning` as one line on stderr, and suppress other warnings.

    A model that is loaded twice is warned of once.

    Yields:
        List to which the shown messages are appended.
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
        if issubclass(category, SlowPathWarning | VocabularyWarning) and text in shown:
            return
        shown.append(text)
        print(f"warning {text}", file=sys.stderr)

    with _quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", DraftwiseWarning)
        warnings.showwarning = show
        yield shown


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Limit logs of transformers, which are meant for developers, to errors.

    transformers reads the environment variable when it is first imported.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "error"
    _set_here.add(_VERBOSITY)
    try:
        yield
    finally:
        _set_here.discard(_VERBOSITY)
        del os.environ[_VERBOSITY]
