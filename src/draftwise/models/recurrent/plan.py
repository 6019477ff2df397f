"""The recurrent layers of the pass that a thread computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_recurrence: ContextVar[Any] = ContextVar("recurrence", default=None)


def current_recurrence() -> Any:
    """What computes recurrent layers; ``None`` outside of planned passes."""
    return _recurrence.get()


@contextmanager
def recurring(recurrence: Any) -> Iterator[None]:
    """Within the context, recurrent layers are computed by ``recurrence``."""
    token = _recurrence.set(recurrence)
    try:
        yield
    finally:
        _recurrence.reset(token)
