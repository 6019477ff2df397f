"""``draftwise train mtp``: how the MTP layer of a target is trained.

The layer is the target's own, or a new one. Embedding and projection are the target's, which is
frozen. The layer learns the target's distributions by the drafts that it makes when it is served
(see :mod:`draftwise.distillation.unrolled_mtp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.mtp_folder import MtpTarget, find_mtp, write_mtp
from draftwise.distillation.card import CardTexts
from draftwise.distillation.chain_task import ChainTask
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.recipe import Prepared, Recipe
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.tasks import MAX_LOGIT_BYTES
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled_mtp import follow_chains, unroll_mtp
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.models.heads.mtp import num_mtp_layers, read_mtp
from draftwise.training.mtp import mtp_tensors, new_mtp_layer
from draftwise.training.schedule import Schedule

# Families whose layer is trained: dense ones whose layer reads the state after the final norm.
_FAMILIES = ("qwen3_5_text",)


class MtpRecipe(Recipe):
    """Trains the MTP layer of a target further, or a new one."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """See :class:`Recipe`; finds the layer that is continued.

        Raises:
            InvalidParameterError: there is no MTP layer in the folder.
        """
        super().__init__(settings, trust_remote_code)
        self._start: Path | None = None
        if settings.start_from is not None:
            self._start = find_mtp(settings.start_from)
            if self._start is None:
                raise InvalidParameterError(
                    "start_from", f"there is no MTP layer in {settings.start_from!r}"
                )

    def check(self, config: Any) -> None:
        """See :class:`Recipe`.

        Raises:
            UnsupportedModelError: the layers of this family are not trained, or it has several.
        """
        reason = why_not_trained(config)
        if reason is not None:
            raise UnsupportedModelError("target", reason)

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`Recipe`."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        text = teacher.config
        target = MtpTarget.of(text)
        has_one = self._start is not None or num_mtp_layers(text) > 0
        if has_one:
            name = settings.start_from or settings.target
            layer = read_mtp(teacher.model, name, self._start).layers[0].float()
        else:
            layer = new_mtp_layer(teacher.model)
        layer.to(teacher.device).requires_grad_(True)
        follow_chains(layer)
        target_ids = torch.arange(teacher.vocab_size)
        facts = {
            "kind": "MTP layer",
            "is_new": not has_one,
            "num_parameters": sum(each.numel() for each in layer.parameters()),
            "num_unrolled": settings.num_steps,
        }

        def write(folder: Path) -> None:
            tensors = mtp_tensors(layer)
            stored = {
                name: each.to("cpu", torch.bfloat16).contiguous() for name, each in tensors.items()
            }
            write_mtp(folder, target, stored)

        return Prepared(
            MtpTask(layer, teacher, rows, target_ids, schedule, settings),
            lambda name: True,
            partial(chain_logits_of_mtp, layer, teacher),
            target_ids,
            facts,
            write,
        )

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`Recipe`."""
        target = facts["target"]
        origin = "new" if facts["is_new"] else "continued"
        return CardTexts(
            f"MTP layer for {target}",
            f"A {origin} layer with {facts['num_parameters']:,} parameters. It reads the states of "
            f"`{target}` and\npredicts the token after the next one. It was trained by its own "
            f"drafts of {facts['num_unrolled']} tokens. The tensors have the\nnames of checkpoints "
            "of Qwen3.5, `mtp.*`.",
        )


def why_not_trained(config: Any) -> str | None:
    """The reason why the MTP layer of a target is not trained; ``None`` if it can be.

    Args:
        config: configuration of the target, or of its text part.
    """
    if config.model_type not in _FAMILIES or config.layer_types[-1] != "full_attention":
        return (
            f"MTP layers of {config.model_type} are not trained, those of dense Qwen3.5 models "
            "whose last layer has attention are; train an EAGLE-3 head"
        )
    if num_mtp_layers(config) > 1:
        return "it has several MTP layers that follow each other; one is supported"
    return None


class MtpTask(ChainTask[nn.Module]):
    """Trains an MTP layer; see :class:`ChainTask`."""

    @property
    def rows_per_pass(self) -> int:
        """As the schedule says, and as many as have logits that fit in memory."""
        length = self._rows.tokens.shape[1]
        fitting = MAX_LOGIT_BYTES // (4 * length * self._teacher.vocab_size)
        return max(1, min(super().rows_per_pass, fitting))

    def outputs(self, rows: Rows, reading: Reading, begins: Tensor) -> Iterator[Tensor]:
        """See :class:`ChainTask`."""
        return _outputs(self.model, self._teacher, rows, reading, begins, self._num_steps)

    def logits(self, out: Tensor) -> Tensor:
        """See :class:`ChainTask`."""
        return self._teacher.logits_with_gradient(out)


def chain_logits_of_mtp(
    layer: nn.Module,
    teacher: Teacher,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """What an MTP layer proposes along given texts.

    With a layer and its target, it is a :data:`draftwise.distillation.evaluation.ChainLogits`.
    """
    with reading.autocast():
        for out in _outputs(layer, teacher, rows, reading, begins, num_steps):
            yield teacher.logits_with_gradient(out)


def _outputs(
    layer: nn.Module,
    teacher: Teacher,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    rotary = teacher.model.get_decoder().rotary_emb
    states = unroll_mtp(layer, rotary, rows, reading.final, teacher.embedding, num_steps)
    for state in states:
        yield state[begins]
