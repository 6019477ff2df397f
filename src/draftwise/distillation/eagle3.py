"""``draftwise train eagle3``: how an EAGLE-3 head is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwise.checkpoints.draft_folder import write_draft
from draftwise.checkpoints.heads import public_name
from draftwise.distillation.card import CardTexts
from draftwise.distillation.chain_task import ChainTask
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows, choose_draft_tokens
from draftwise.distillation.evaluation import NUM_DRAFTED
from draftwise.distillation.head import Eagle3Head, speculators_config
from draftwise.distillation.recipe import Prepared, Recipe
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.speculators import head_tensors
from draftwise.distillation.start import (
    check_head,
    continued_head,
    default_layers,
    embedding_of,
    new_head,
    read_start,
)
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled import unroll
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.training.schedule import Schedule

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


class HeadTask(ChainTask[Eagle3Head]):
    """Trains a head; see :class:`ChainTask`."""

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
            teacher, rows, target_ids, schedule, settings: see :class:`ChainTask`.
            embedding: ``[vocab, hidden]`` the embedding that the head reads.
        """
        super().__init__(head, teacher, rows, target_ids, schedule, settings)
        self._embedding = embedding

    def outputs(self, rows: Rows, reading: Reading, begins: Tensor) -> Iterator[Tensor]:
        """See :class:`ChainTask`."""
        return unroll(self.model, rows, reading.states, self._embedding, begins, self._num_steps)

    def logits(self, out: Tensor) -> Tensor:
        """See :class:`ChainTask`."""
        return self.model.logits(out)


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
    with reading.autocast():
        for out in unroll(head, rows, reading.states, embedding, begins, num_steps):
            yield head.logits(out)
