"""The grids of block types whose numbers are entries of a grid."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from draftwise.checkpoints.imports import quiet_import


@cache
def grid_of(type_name: str) -> NDArray[np.uint8] | None:
    """The entries of the grid of a block type.

    Args:
        type_name: the type in ggml, such as ``"IQ2_XS"``.

    Returns:
        ``[entries, numbers]`` the place of each number among the numbers of the grid in ascending
        order, or ``None`` if the package ``gguf``, which has the grids, is not installed.
    """
    try:
        with quiet_import():
            from gguf import quants
    except ImportError:
        return None
    kind = getattr(quants, type_name)
    kind.init_grid()
    _, places = np.unique(kind.grid, return_inverse=True)
    return places.reshape(kind.grid_shape).astype(np.uint8)
