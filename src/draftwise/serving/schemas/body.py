"""What all bodies have in common: a closed set of keys, strict types, one error at a time."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

LARGEST_TOKEN_ID = (1 << 31) - 1
# What is repeated of a client's own text in an error.
_LONGEST_QUOTE = 80

TokenId = Annotated[int, Field(ge=0, le=LARGEST_TOKEN_ID)]


class Body(BaseModel):
    """An object whose unknown keys are refused by name, before any value is looked at.

    Numbers, booleans and strings are not converted into each other. A key with the value ``null``
    counts as absent.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for key in given:
            if key not in known:
                raise unknown_key(key, known)
        return {key: value for key, value in given.items() if value is not None}


def unknown_key(key: str, known: set[str]) -> PydanticCustomError:
    """The error for a key that means nothing, with the nearest known key as a hint."""
    name = quoted(key)
    near = difflib.get_close_matches(key[:_LONGEST_QUOTE], sorted(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return wrong(f"unknown key {name}; {hint}", key[:_LONGEST_QUOTE])


def wrong(message: str, at: str = "") -> PydanticCustomError:
    """An error of a value.

    Args:
        message: what is wrong and what is accepted.
        at: where in the value, such as ``"[3]"`` or the name of a key; empty for all of it.
    """
    return PydanticCustomError("draftwise", "{message}", {"message": message, "at": at})


def quoted(value: object) -> str:
    """A value of a client as an error repeats it: in JSON's words, and short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str) and len(value) > _LONGEST_QUOTE:
        return f"{value[:_LONGEST_QUOTE]!r}…"
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number"
    return text if len(text) <= _LONGEST_QUOTE + 2 else f"{text[:_LONGEST_QUOTE]}…"


def is_token_id(value: object) -> bool:
    """Whether a value can be a token id of some model."""
    return type(value) is int and 0 <= value <= LARGEST_TOKEN_ID


def check_token_ids(value: list[Any], at: str = "") -> None:
    """Refuse a list with something that is no token id, naming the first."""
    for index, each in enumerate(value):
        if not is_token_id(each):
            raise wrong(
                f"must be a token id, an integer of at least 0, got {quoted(each)}",
                f"{at}[{index}]",
            )


def check_strings(value: list[Any]) -> None:
    """Refuse a list with something that is no string, naming the first."""
    for index, each in enumerate(value):
        if not isinstance(each, str):
            raise wrong(f"must be a string, got {quoted(each)}", f"[{index}]")
