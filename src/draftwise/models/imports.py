"""Imports that would otherwise write to the user's terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# torchao reports every kernel built for another machine, and PyTorch the way torchao registers
# its types.
_TALKATIVE = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Import torchao, or what imports it, without its messages.

    ``transformers`` imports torchao along with its model code wherever it is installed.
    """
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
