"""Imports without the log messages that they would write to the user's terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# torchao warns about each of its kernels that was built for another machine. PyTorch warns about
# how torchao registers its types.
_VERBOSE_LOGGERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress torchao's messages while it is imported, directly or by another package.

    ``transformers`` imports torchao together with its model code wherever torchao is installed.
    """
    loggers = [logging.getLogger(name) for name in _VERBOSE_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
