"""Size of a model's stored weights."""

from __future__ import annotations

from typing import Any

from draftwise.models.loading import LoadedModel


def stored_bytes(model: LoadedModel) -> float:
    """Bytes of the weights that a pass reads, in bfloat16 or a narrower format."""
    native: Any = model.model.native
    return 2 * model.num_parameters if native is None else native.weight_bytes
