"""``draftwise train eagle3``: how an EAGLE-3 head is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.checkpoints.draft_folder import write_draft
from draftwise.checkpoints.heads import public_name
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.evaluation import NUM_DRAFTED
from draftwise.distillation.folder import head_tensors, speculators_config
from draftwise.distillation.head import Eagle3Head
from draftwise.distillation.objective import HeadTask, Readings
from draftwise.distillation.recipe import CardTexts, Prepared
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.start import (
    check_start,
    continued_head,
    default_layers,
    embedding_of,
    new_head,
    read_start,
    trained_parameters,
)
from draftwise.distillation.state_scale import state_scale
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled import unroll
from draftwise.distillation.vocabulary import choose_draft_tokens
from draftwise.training.losses import LOSSES
from draftwise.training.schedule import Schedule

_EMBEDDING = "embed_tokens.weight"


class Eagle3Recipe:
    """Trains a new head, or continues one."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """Read the head that is continued, if there is one.

        Args:
            settings: settings of the run.
            trust_remote_code: not used, as a head has no code.

        Raises:
            DraftwiseError: it cannot be read.
        """
        self._settings = settings
        self._start = None if settings.start_from is None else read_start(settings.start_from)

    def check(self, config: Any) -> None:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        if self._settings.start_from is not None:
            check_start(self._settings.start_from, config)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        if self._start is not None:
            return self._start[0].states_of(num_layers)
        return self._settings.layers or default_layers(num_layers)

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        settings = self._settings
        scale = state_scale(teacher, rows)
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
        task = HeadTask(
            head,
            teacher,
            rows,
            target_ids,
            schedule,
            LOSSES[settings.loss],
            settings.num_steps,
            Readings(teacher, rows, round(settings.state_gib * 2**30)),
            embedding,
            settings.seed,
        )
        facts = {
            "kind": "EAGLE-3 head",
            "layers": list(teacher.layers),
            "num_parameters": trained_parameters(head),
            "num_unrolled": settings.num_steps,
        }
        return Prepared(
            task,
            _is_matrix,
            partial(chain_logits_of_head, head, embedding),
            target_ids,
            facts,
            partial(self._write, teacher, head, target_ids, stored),
        )

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
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

    def _write(
        self,
        teacher: Teacher,
        head: Eagle3Head,
        target_ids: Tensor,
        embedding: Tensor | None,
        folder: Path,
    ) -> None:
        weights = head.weights()
        if embedding is not None:
            weights[_EMBEDDING] = embedding
        architectures = list(getattr(teacher.config, "architectures", None) or [])
        target = public_name(self._settings.target)
        config = speculators_config(head.config, target, architectures, NUM_DRAFTED)
        write_draft(folder, config, head_tensors(weights, target_ids, teacher.vocab_size))


def chain_logits_of_head(
    head: Eagle3Head,
    embedding: Tensor,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """What a head proposes along given texts.

    It is a :data:`draftwise.distillation.evaluation.ChainLogits`.

    Args:
        head: the head.
        embedding: ``[vocab, hidden]`` the embedding that it reads.
        rows: packed documents.
        reading: what the target computed for them.
        begins: ``[rows, length]`` whether a draft begins after a position.
        num_steps: number of steps.
    """
    use_bfloat16 = reading.states.dtype == torch.bfloat16
    with torch.autocast(reading.states.device.type, torch.bfloat16, enabled=use_bfloat16):
        for step in unroll(head, rows, reading.states, embedding, begins, num_steps):
            yield head.logits(step.out)


def _is_matrix(name: str) -> bool:
    """Whether Muon trains a parameter: all matrices but the projection to the vocabulary."""
    return not name.startswith("lm_head")
