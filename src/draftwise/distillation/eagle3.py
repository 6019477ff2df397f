"""``draftwise train eagle3``: how an EAGLE-3 head is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.checkpoints.draft_folder import write_draft
from draftwise.checkpoints.heads import public_name
from draftwise.distillation.card import CardTexts
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows, choose_draft_tokens, shifted
from draftwise.distillation.evaluation import NUM_DRAFTED
from draftwise.distillation.head import Eagle3Head, head_tensors, speculators_config
from draftwise.distillation.recipe import Prepared, Recipe
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.start import (
    check_head,
    continued_head,
    default_layers,
    embedding_of,
    new_head,
    read_start,
)
from draftwise.distillation.tasks import RowTask
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled import unroll
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.training.losses import LOSSES, mean_loss
from draftwise.training.schedule import Schedule

STEP_DECAY = 0.8
_EMBEDDING = "embed_tokens.weight"


class Eagle3Recipe(Recipe):
    """Trains a new head, or continues one."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """See :class:`Recipe`; reads the head that is continued."""
        super().__init__(settings, trust_remote_code)
        self._start = None if settings.start_from is None else read_start(settings.start_from)

    def check(self, config: Any) -> None:
        """See :class:`Recipe`."""
        if self._start is not None:
            try:
                check_head(*self._start, config)
            except UnsupportedModelError as error:
                raise InvalidParameterError("start_from", error.message) from error

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`Recipe`."""
        if self._start is not None:
            return self._start[0].states_of(num_layers)
        return self.settings.layers or default_layers(num_layers)

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`Recipe`."""
        settings = self.settings
        scale = teacher.state_scale(rows)
        embedding, stored = teacher.embedding, None
        if self._start is None:
            target_ids = choose_draft_tokens(
                collected.training, settings.draft_vocab, teacher.vocab_size, collected.end_tokens
            )
            head = new_head(teacher, target_ids, scale, settings.seed)
        else:
            config, weights = self._start
            config.check_target(teacher.hidden_size, teacher.vocab_size, teacher.num_layers)
            target_ids = weights.target_ids
            head = continued_head(config, weights, scale).to(teacher.device)
            embedding = embedding_of(teacher, weights)
            stored = weights.tensors.get(_EMBEDDING)
        task = HeadTask(head, teacher, rows, target_ids, schedule, settings, embedding)
        facts = {
            "kind": "EAGLE-3 head",
            "layers": list(teacher.layers),
            "num_parameters": head.num_parameters,
            "num_unrolled": settings.num_steps,
        }

        def write(folder: Path) -> None:
            tensors = head.weights()
            if stored is not None:
                tensors[_EMBEDDING] = stored
            architectures = list(getattr(teacher.config, "architectures", None) or [])
            target = public_name(settings.target)
            config = speculators_config(head.config, target, architectures, NUM_DRAFTED)
            write_draft(folder, config, head_tensors(tensors, target_ids, teacher.vocab_size))

        return Prepared(
            task,
            # Muon trains all matrices but the projection to the vocabulary.
            lambda name: not name.startswith("lm_head"),
            partial(chain_logits_of_head, head, embedding),
            target_ids,
            facts,
            write,
        )

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`Recipe`."""
        target = facts["target"]
        layers = ", ".join(map(str, facts["layers"]))
        return CardTexts(
            f"EAGLE-3 head for {target}",
            f"A drafting head with {facts['num_parameters']:,} parameters. It reads the hidden "
            f"states {layers} of\n`{target}` and proposes {facts['draft_vocab']:,} of its "
            f"{facts['target_vocab']:,} tokens. It was trained by training-time test\nover "
            f"{facts['num_unrolled']} steps (Li et al. 2025, arXiv:2503.01840). The folder has the "
            "layout of `speculators`, which other\nengines read too.",
        )


class HeadTask(RowTask[Eagle3Head]):
    """Trains a head on the target's distributions, by chains of several steps.

    The target's distribution at a position is its softmax over the draft's tokens. Every position
    counts whose next token the draft can propose. For an answer sampled at temperature 1 that is in
    expectation the cross entropy to the target's whole distribution: a position counts with the
    probability of the draft's tokens. For a greedy answer it is EAGLE-3's mask of positions whose
    best token lies outside.

    A chain ends where a token lies outside the draft's vocabulary, as drafting would.

    What the target computed for the rows is kept in memory, up to a limit. Rows beyond the limit
    are computed again in every epoch.
    """

    def __init__(
        self,
        head: Eagle3Head,
        teacher: Teacher,
        rows: Rows,
        target_ids: Tensor,
        schedule: Schedule,
        settings: TrainingSettings,
        embedding: Tensor,
    ) -> None:
        """Create the task at the beginning of its data.

        Args:
            head: the head, on the teacher's device.
            teacher: the target.
            rows: training rows.
            target_ids: ``[draft_vocab]`` the target's ids of the head's tokens.
            schedule: gives the sizes of a batch.
            settings: the loss, the steps of each chain, the memory for readings, and the seed.
            embedding: ``[vocab, hidden]`` the embedding that the head reads.
        """
        super().__init__(head, teacher, rows, schedule, LOSSES[settings.loss], settings.seed)
        self._target_ids = target_ids.to(teacher.device)
        self._is_in_draft = torch.zeros(teacher.vocab_size, dtype=torch.bool, device=teacher.device)
        self._is_in_draft[self._target_ids] = True
        self._num_steps = settings.num_steps
        self._embedding = embedding
        self._readings: dict[int, Reading] = {}
        self._bytes_left = round(settings.state_gib * 2**30)

    @property
    def rows_per_pass(self) -> int:
        """As the schedule says."""
        return max(1, self._schedule.micro_batch_tokens // self._rows.tokens.shape[1])

    def loss_of(self, indices: Sequence[int], rows: Rows) -> Tensor:
        """See :class:`RowTask`."""
        found = [self._readings.get(index) or self._read(index) for index in indices]
        device = self._teacher.device
        reading = Reading(
            torch.cat([each.states.to(device) for each in found]),
            torch.cat([each.final.to(device) for each in found]),
        )
        return self.loss(rows, reading)

    def loss(self, rows: Rows, reading: Reading) -> Tensor:
        """Loss of packed rows: the mean of each step, weighted by :data:`STEP_DECAY` ** k."""
        masks = [self._learned(rows, depth) for depth in range(self._num_steps)]
        total = torch.zeros((), device=self._teacher.device)
        if not bool(masks[0].any()):
            return total
        # Positions whose distribution some step learns.
        needed = torch.zeros_like(masks[0])
        for depth, mask in enumerate(masks):
            needed[:, depth + 1 :] |= mask[:, : -(depth + 1)]
        # [n, draft_vocab] the target's softmax on the draft's tokens.
        p = self._teacher.logits(reading.final[needed], self._target_ids).float().softmax(dim=-1)
        place = torch.cumsum(needed.flatten(), 0).view(needed.shape) - 1
        use_bfloat16 = reading.states.dtype == torch.bfloat16
        weights = [STEP_DECAY**depth for depth in range(self._num_steps)]
        with torch.autocast(self._teacher.device.type, torch.bfloat16, enabled=use_bfloat16):
            outs = unroll(
                self.model, rows, reading.states, self._embedding, masks[0], self._num_steps
            )
            for depth, (out, mask, weight) in enumerate(zip(outs, masks, weights, strict=True)):
                if not bool(mask.any()):
                    break
                # A chain that learns a step has learned all earlier ones.
                logits = self.model.logits(out[mask[masks[0]]])
                labels = shifted(place, depth + 1)[mask]
                total = total + weight * mean_loss(self._loss, logits, p, labels)
        return total / sum(weights)

    def _read(self, index: int) -> Reading:
        # Alone, so that the result does not depend on the other rows of a pass: a resumed run
        # computes the same values as an uninterrupted one.
        reading = self._teacher.read_trimmed(self._rows.take([index], self._teacher.device))
        size = sum(each.numel() * each.element_size() for each in (reading.states, reading.final))
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._readings[index] = Reading(reading.states.cpu(), reading.final.cpu())
        return reading

    def _learned(self, rows: Rows, depth: int) -> Tensor:
        """``[rows, length]`` whether the chain of a position learns its step ``depth``."""
        good = rows.is_learned & self._is_in_draft[rows.tokens]
        learned = torch.ones_like(good)
        for offset in range(2, depth + 3):
            learned = learned & shifted(good, offset, 0)
        # Documents are contiguous, so the last token decides.
        return learned & (shifted(rows.documents, depth + 2, -2) == rows.documents)


def chain_logits_of_head(
    head: Eagle3Head,
    embedding: Tensor,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """What a head proposes along given texts.

    With a head and the embedding ``[vocab, hidden]`` that it reads, it is a
    :data:`draftwise.distillation.evaluation.ChainLogits`.
    """
    use_bfloat16 = reading.states.dtype == torch.bfloat16
    with torch.autocast(reading.states.device.type, torch.bfloat16, enabled=use_bfloat16):
        for out in unroll(head, rows, reading.states, embedding, begins, num_steps):
            yield head.logits(out)
