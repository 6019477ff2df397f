"""The kinds of things that are examined, each with the list of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from . import comparison, formats, heads
from .architectures import causal, image_text
from .processes import Task


def _causal() -> list[Task]:
    return [Task(each.kind, each.name, partial(comparison.examine, each)) for each in causal()]


def _image_text() -> list[Task]:
    return [Task(each.kind, each.name, partial(comparison.examine, each)) for each in image_text()]


def _heads() -> list[Task]:
    return [Task("heads", each, partial(heads.examine, each)) for each in heads.LAYOUTS]


def _formats() -> list[Task]:
    return [Task("formats", each, partial(formats.examine, each)) for each in formats.FORMATS]


KINDS: Mapping[str, Callable[[], list[Task]]] = {
    "causal": _causal,
    "image-text": _image_text,
    "formats": _formats,
    "heads": _heads,
}


def select(kinds: Sequence[str], names: Sequence[str] = ()) -> list[Task]:
    """Tasks of the kinds; with names, only these.

    Raises:
        ValueError: nothing has one of the names.
    """
    found = [task for kind in kinds for task in KINDS[kind]()]
    unknown = set(names) - {each.name for each in found}
    if unknown:
        raise ValueError(f"nothing is called {', '.join(sorted(unknown))}")
    return [each for each in found if not names or each.name in names]
