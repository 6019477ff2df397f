"""Root mean square normalisation of a layer, with a weight in the dtype that keeps its digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.decoder_spec import NormSpec


class Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019), equation 4.

    Attributes:
        weight: ``[size]`` factor of each normalised number, in the model's dtype or float32.
        epsilon: added to the mean square.
    """

    def __init__(self, spec: NormSpec, dtype: torch.dtype) -> None:
        """Take over a norm of a model with a dtype."""
        self.epsilon = spec.epsilon
        rounded = spec.weight.to(dtype)
        # A factor 1 + weight needs more digits than short types have.
        self._is_exact = torch.equal(rounded.float(), spec.weight)
        self.weight = rounded if self._is_exact else spec.weight
        self._shape = tuple(spec.weight.shape)

    @classmethod
    def of(cls, spec: NormSpec | None, dtype: torch.dtype) -> Norm | None:
        """The norm, if there is one."""
        return None if spec is None else cls(spec, dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalise ``[..., size]``."""
        if self._is_exact:
            return F.rms_norm(hidden, self._shape, self.weight, self.epsilon)
        normalised = F.rms_norm(hidden.float(), self._shape, self.weight, self.epsilon)
        return normalised.to(hidden.dtype)

    def of_heads(self, heads: Tensor) -> Tensor:
        """Normalise ``[tokens, heads, head]``: each head, or all heads of a token together."""
        if heads.shape[-1] == self._shape[0]:
            return self(heads)
        return self(heads.flatten(1)).view(heads.shape)
