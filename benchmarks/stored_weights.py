"""Size of a model's stored weights."""

from __future__ import annotations

from typing import Any

from draftwise.models.loading import LoadedModel


def stored_bytes(model: LoadedModel) -> float:
    """Bytes of a model's stored weights, in bfloat16 or a narrower format."""
    native: Any = model.model.native
    bits = 16 if native is None else native.bits
    return model.num_parameters * bits / 8
