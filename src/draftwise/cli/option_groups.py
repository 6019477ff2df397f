"""Options that several commands share as one dataclass, which each command takes as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Group = TypeVar("Group")


def takes_group(
    group: type[Group], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take a group of options as its first argument.

    Typer reads the options of a command from its signature. The decorated command has one option
    for each field of the group, in their order, and then the options of its other parameters.

    Args:
        group: a dataclass. The annotation of each field is that of a command's parameter,
            ``Annotated[type, typer.Option(…)]``. A field without a default is a required option.
        defaults: defaults of this command that differ from those of the group.

    Raises:
        TypeError: there is a default without a field, or ``group`` is no dataclass.
    """
    # Any: mypy has no type for "a dataclass".
    found: tuple[Field[Any], ...] = fields(group)  # type: ignore[arg-type]
    unknown = defaults.keys() - {item.name for item in found}
    if unknown:
        raise TypeError(f"{group.__name__} has no option {sorted(unknown)[0]!r}")
    hints = get_type_hints(group, include_extras=True)
    shared = [_parameter(item, hints[item.name], defaults) for item in found]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            *shared,
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own),
        ]

        @wraps(command)
        def run(**options: Any) -> None:
            values = {item.name: options.pop(item.name) for item in found}
            command(group(**values), **options)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(item: Field[Any], annotation: Any, defaults: dict[str, Any]) -> inspect.Parameter:
    default = defaults.get(item.name, item.default)
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=annotation,
    )
