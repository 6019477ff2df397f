"""Base class of request bodies: strict types, null as absent, and helpers for errors."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

LARGEST_TOKEN_ID = (1 << 31) - 1
# Maximum number of characters of a client's value in an error message.
_LONGEST_QUOTE = 80

TokenId = Annotated[int, Field(ge=0, le=LARGEST_TOKEN_ID)]


class Body(BaseModel):
    """An object whose keys with the value ``null`` count as absent.

    Unknown keys are rejected before any value is checked, unless a subclass allows them. Numbers,
    booleans and strings are not converted into each other.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        present = _without_nulls(given)
        if cls.model_config["extra"] == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for key in present:
                if key not in known:
                    raise unknown_key(key, known)
        return present


class Neutral:
    """Annotation of a key that the server cannot fulfil.

    It is accepted with values that ask for nothing, and then is ``None``.
    """

    def __init__(self, refusal: str, *values: Any) -> None:
        """Create the annotation.

        Args:
            refusal: why other values are rejected, and what to send instead.
            values: values that ask for nothing.
        """
        self._refusal, self._values = refusal, values

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """The validator."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The accepted values."""
        return {"enum": [None, *self._values], "description": f"Not supported: {self._refusal}."}

    def _check(self, value: Any) -> None:
        if isinstance(value, dict):
            value = _without_nulls(value)
        if not any(type(value) is type(each) and value == each for each in self._values):
            raise wrong(self._refusal)


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def unknown_key(key: str, known: set[str]) -> PydanticCustomError:
    """Create the error for an unknown key, with the closest known key as a hint."""
    name = quoted(key)
    near = difflib.get_close_matches(key[:_LONGEST_QUOTE], sorted(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return wrong(f"unknown key {name}; {hint}", key[:_LONGEST_QUOTE])


def wrong(message: str, at: str = "") -> PydanticCustomError:
    """Create the error for an invalid value.

    Args:
        message: what is wrong and what is accepted.
        at: location within the value, such as ``"[3]"`` or the name of a key; empty for the whole
            value.
    """
    return PydanticCustomError("draftwise", "{message}", {"message": message, "at": at})


def quoted(value: object) -> str:
    """Format a value of a client for an error message, in JSON's terms and shortened."""
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
    except ValueError:  # an integer with more digits than Python converts to text
        return "a number"
    return text if len(text) <= _LONGEST_QUOTE + 2 else f"{text[:_LONGEST_QUOTE]}…"


def is_token_id(value: object) -> bool:
    """Whether a value is an integer in the range of token ids."""
    return type(value) is int and 0 <= value <= LARGEST_TOKEN_ID


def check_token_ids(value: list[Any], at: str = "") -> None:
    """Raise an error for the first item of a list that is not a token id."""
    for index, each in enumerate(value):
        if not is_token_id(each):
            raise wrong(
                f"must be a token id, an integer of at least 0, got {quoted(each)}",
                f"{at}[{index}]",
            )


def check_strings(value: list[Any]) -> None:
    """Raise an error for the first item of a list that is not a string."""
    for index, each in enumerate(value):
        if not isinstance(each, str):
            raise wrong(f"must be a string, got {quoted(each)}", f"[{index}]")
