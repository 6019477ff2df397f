"""Muon for matrices, in the precision that the device multiplies fast, and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from draftwise.devices import fast_dtype
from draftwise.errors import NumericalError
from draftwise.training.schedule import Schedule

# Coefficients of the iteration, and the length below which a gradient is not scaled further.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Optimizers:
    """The two optimisers of a model, with the learning rates of its schedule."""

    def __init__(
        self, model: nn.Module, is_matrix: Callable[[str], bool], schedule: Schedule
    ) -> None:
        """Create the optimisers of all parameters of ``model`` that require gradients.

        Args:
            model: the model, on its device.
            is_matrix: whether the two-dimensional parameter of this name is one for Muon.
                Embeddings and projections to a vocabulary are not.
            schedule: the run's schedule.
        """
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for_muon = parameter.ndim == 2 and is_matrix(name)
                (matrices if for_muon else others).append(parameter)
        self._parameters = matrices + others
        self._schedule = schedule
        # (optimiser, its peak learning rate)
        self._each: list[tuple[torch.optim.Optimizer, float]] = []
        if matrices:
            muon = Muon(matrices, schedule.muon_learning_rate, schedule.weight_decay)
            self._each.append((muon, schedule.muon_learning_rate))
        if others:
            adamw = torch.optim.AdamW(
                others, lr=schedule.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )
            self._each.append((adamw, schedule.adamw_learning_rate))

    def step(self, progress: float) -> None:
        """Clip the gradients, update the parameters and clear the gradients.

        Raises:
            NumericalError: a gradient is not finite. The parameters are unchanged.
        """
        factor = self._schedule.learning_rate_factor(progress)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._schedule.gradient_norm)
        if not math.isfinite(norm):
            raise NumericalError(
                "gradient",
                f"its norm is {float(norm)}, so training stopped; the last checkpoint is kept. "
                "Use float32, or a lower learning rate",
            )
        for optimizer, peak in self._each:
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """States of the optimisers."""
        return [optimizer.state_dict() for optimizer, _ in self._each]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from states returned by :meth:`state_dict`."""
        for (optimizer, _), saved in zip(self._each, states, strict=True):
            optimizer.load_state_dict(saved)


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
