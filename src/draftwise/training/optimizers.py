"""Muon for matrices and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draftwise.errors import NumericalError
from draftwise.training.muon import Muon
from draftwise.training.schedule import Schedule


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
