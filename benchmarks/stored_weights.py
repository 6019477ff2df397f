"""How much of a model there is to read."""

from __future__ import annotations

from typing import Any

from draftwise.models.loading import LoadedModel


def stored_bytes(model: LoadedModel) -> float:
    """Bytes of a model's weights as they are stored, of bfloat16 or narrower."""
    native: Any = model.model.native
    bits = 16 if native is None else native.bits
    return model.num_parameters * bits / 8
