"""What a configuration says about rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rotary_settings(parameters: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The settings of all rotary embeddings of a configuration.

    Args:
        parameters: ``rope_parameters``: the settings of one embedding, or of one for each type of
            layers.
    """
    found = parameters or {}
    by_type = [each for each in found.values() if isinstance(each, Mapping)]
    return by_type or [found]


def depends_on_length(settings: Mapping[str, Any]) -> bool:
    """Whether the angles of a rotary embedding depend on the length of the text.

    ``longrope`` with the same factors for short and long texts does not.
    """
    kind = settings.get("rope_type", "default")
    if kind == "longrope":
        return bool(settings.get("long_factor") != settings.get("short_factor"))
    return bool(kind == "dynamic")
