"""The Muon optimiser, computed in the precision that the device multiplies fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from draftwise.devices import fast_dtype

# Coefficients of the iteration, and the length below which a gradient is not scaled further.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024).

    The algorithm and its state are those of `torch.optim.Muon` with Nesterov momentum and
    ``adjust_lr_fn="match_rms_adamw"`` (Liu et al., arXiv:2502.16982). That one always iterates in
    bfloat16. A processor that only emulates bfloat16 would spend most of a training step there, so
    it uses float32 here.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        """Create the optimiser of matrices.

        Args:
            parameters: two-dimensional parameters.
            lr: learning rate.
            weight_decay: share of a parameter that a step removes, as a multiple of ``lr``.
            momentum: share of the running mean of gradients that a step keeps.
        """
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, momentum, lr = parameter.grad, group["momentum"], group["lr"]
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - momentum)
        update = orthogonalized(gradient.lerp(mean, momentum))
        parameter.mul_(1 - lr * group["weight_decay"])
        # The update has the root mean square of AdamW's.
        parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The matrix with singular values of about 1, by Newton-Schulz iterations.

    Args:
        matrix: ``[rows, columns]``.
        dtype: precision of the iterations; ``None`` is bfloat16 where the device multiplies it
            fast, and float32 elsewhere.

    Returns:
        ``[rows, columns]`` in ``dtype``, with singular values between about 0.7 and 1.2.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype or fast_dtype(matrix.device))
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x
