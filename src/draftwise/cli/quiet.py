"""Of all the warnings of a run, those that a user of the command should read."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from draftwise.errors import DraftwiseWarning


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

    # The models' library talks to developers.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", DraftwiseWarning)
        warnings.showwarning = show
        yield shown
