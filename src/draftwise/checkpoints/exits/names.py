"""Names of exits: ``target:exit=8`` is the target left after its eighth layer."""

from __future__ import annotations

from draftwise.core.formats import EXIT_PREFIX, QUANTIZATIONS
from draftwise.errors import InvalidParameterError

_TARGET, _, _EXIT = EXIT_PREFIX.partition(":")
_MAX_DIGITS = 6


def exit_layers(name: str, role: str) -> int | None:
    """The number of layers in the name of an exit.

    Args:
        name: the name of a draft or companion.
        role: ``"draft"`` or ``"companion"``; named in errors.

    Returns:
        The number, at least 1; ``None`` if the name is not that of an exit.

    Raises:
        InvalidParameterError: the name looks like that of an exit and is none.
    """
    owner, found, rest = name.partition(f":{_EXIT}")
    if not found or (rest and rest[0] not in "=:"):
        return None
    number, _, suffix = rest.removeprefix("=").partition(":")
    if suffix in QUANTIZATIONS:
        raise InvalidParameterError(
            role, f"{name!r} is an exit, which has the target's weights and is not quantised"
        )
    if owner != _TARGET:
        raise InvalidParameterError(
            role,
            f"{name!r} names an exit of another model; an exit is always one of the target, "
            f"'{EXIT_PREFIX}={number}'",
        )
    is_number = number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
    if suffix or not is_number or int(number) < 1:
        raise InvalidParameterError(
            role,
            f"{name!r} must be '{EXIT_PREFIX}=N' with a number of layers N, at least 1",
        )
    return int(number)
