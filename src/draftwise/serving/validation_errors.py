"""Messages for validation errors of request bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.serving.schemas.body import quoted

# Error types of pydantic, and the values that are accepted.
_ACCEPTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_PYDANTIC_PREFIX = "Input should be"


def explain(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Convert a validation error to a message and a field.

    Args:
        error: an item of ``RequestValidationError.errors()``. The first component of its location
            is the part of the request, such as ``"body"``.

    Returns:
        The message, which begins with the field, and the field as a path such as
        ``"messages[3].content"``, or ``None`` for the body as a whole.
    """
    path = _path(error["loc"][1:])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "draftwise":
        message, at = context["message"], context["at"]
        path += at if not path or not at or at.startswith("[") else f".{at}"
    elif kind == "missing":
        message = "is required"
    elif kind in _ACCEPTED:
        message = f"must be {_ACCEPTED[kind]}, got {quoted(error['input'])}"
    elif error["msg"].startswith(_PYDANTIC_PREFIX):
        message = f"must be{error['msg'].removeprefix(_PYDANTIC_PREFIX)}"
    else:
        message = error["msg"]
    return f"{path or 'the body'}: {message}", path or None


def _path(places: Sequence[str | int]) -> str:
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        else:
            path += f".{place}" if path else place
    return path
