"""``draftwise train exit``: how the adapter of an early exit is trained.

The target is frozen. At every position of its answers, the adapter learns to give the target's own
distribution from the residual stream at the exit. So the target need not have been trained for
exits, as LayerSkip's models are (Elhoushi et al. 2024, arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.exits.files import ExitConfig, write_exit
from draftwise.distillation.card import CardTexts
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.recipe import Prepared, Recipe
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.tasks import PositionTask, along_text
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.training.losses import LOSSES
from draftwise.training.schedule import Schedule

_DEFAULT_EPSILON = 1e-6


class TrainedAdapter(nn.Module):
    """The adapter that is trained; see :class:`draftwise.models.exits.adapter.ExitAdapter`.

    It starts as no adapter at all. Its output is scaled by the size of the stream, so that the
    matrices have the same scale for every target. The scale is folded into ``up`` when the folder
    is written.
    """

    def __init__(self, hidden_size: int, rank: int, epsilon: float, scale: float) -> None:
        """Create an adapter.

        Args:
            hidden_size: size of the stream.
            rank: rank of the map.
            epsilon: added to the mean square in the norm.
            scale: root mean square of the stream.
        """
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=epsilon)
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.normal_(self.down.weight, std=hidden_size**-0.5)
        nn.init.zeros_(self.up.weight)
        self._scale = scale

    def forward(self, stream: Tensor) -> Tensor:
        """What the final norm reads in place of ``[..., hidden]``, in float32."""
        stream = stream.float()
        out: Tensor = stream + self._scale * self.up(self.down(self.norm(stream)))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The weights of the folder, in bfloat16, and the norm in float32."""
        stored = {"down.weight": self.down.weight, "up.weight": self._scale * self.up.weight}
        weights = {
            name: each.detach().to("cpu", torch.bfloat16).contiguous()
            for name, each in stored.items()
        }
        return {**weights, "norm.weight": self.norm.weight.detach().float().cpu().contiguous()}


class ExitRecipe(Recipe):
    """Trains the adapter of one exit."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """See :class:`Recipe`."""
        super().__init__(settings, trust_remote_code)
        assert settings.exit is not None  # checked by the settings
        self._exit = settings.exit

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`Recipe`.

        Raises:
            InvalidParameterError: the target has no such exit.
        """
        # Targets whose layers are not found are refused with the reason later.
        if num_layers and self._exit >= num_layers:
            raise InvalidParameterError(
                "exit", f"must be before the target's last layer, and it has {num_layers} layers"
            )
        return (self._exit,)

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`Recipe`."""
        settings = self.settings
        if not teacher.has_final_norm:
            raise UnsupportedModelError(
                "target", "its final norm is not found, which an exit is trained with"
            )
        rank = settings.adapter_rank
        epsilon = float(getattr(teacher.config, "rms_norm_eps", None) or _DEFAULT_EPSILON)
        scale = float(teacher.state_scale(rows).square().mean().sqrt())
        torch.manual_seed(settings.seed)
        adapter = TrainedAdapter(teacher.hidden_size, rank, epsilon, scale).to(teacher.device)
        config = ExitConfig(self._exit, teacher.num_layers, teacher.hidden_size, rank, epsilon)
        facts = {
            "kind": "exit adapter",
            "num_parameters": sum(each.numel() for each in adapter.parameters()),
            "exit": self._exit,
            "adapter_rank": rank,
        }
        return Prepared(
            ExitTask(adapter, teacher, rows, schedule, LOSSES[settings.loss], settings.seed),
            lambda name: name in ("down.weight", "up.weight"),
            partial(_chain_logits, adapter, teacher),
            torch.arange(teacher.vocab_size),
            facts,
            lambda folder: write_exit(folder, config, adapter.tensors()),
        )

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`Recipe`."""
        target = facts["target"]
        return CardTexts(
            f"Early exit of {target}",
            f"An adapter of rank {facts['adapter_rank']} with {facts['num_parameters']:,} "
            f"parameters, which lets the first\n{facts['exit']} layers of `{target}` draft.",
        )


class ExitTask(PositionTask[TrainedAdapter]):
    """Trains an adapter on the target's distributions."""

    def logits(self, rows: Rows, reading: Reading, mask: Tensor) -> Tensor:
        """See :class:`PositionTask`."""
        return self._teacher.logits_of_stream(self.model(reading.states[mask]))


def _chain_logits(
    adapter: TrainedAdapter,
    teacher: Teacher,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    adapter.eval()
    for stream in along_text(adapter(reading.states), begins, num_steps):
        yield teacher.logits_of_stream(stream)
