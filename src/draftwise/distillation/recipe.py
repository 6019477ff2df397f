"""What the kinds of drafts have in common for a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows, RowStream
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.training.loop import Task
from draftwise.training.schedule import Schedule

# (rows, what the target computed for them, [rows, length] whether a draft begins after a position,
# number of steps) -> for each step k, the logits [num_drafts, draft_vocab] with which each draft
# proposes its token k, given the text
ChainLogits = Callable[[Rows, Reading, Tensor, int], Iterator[Tensor]]


class DraftTask(Task, Protocol):
    """A task on packed documents."""

    stream: RowStream


@dataclass(frozen=True)
class Prepared:
    """A draft that is ready to be trained.

    Attributes:
        task: what is trained.
        is_matrix: whether Muon trains the matrix of this name.
        chain_logits: what the draft proposes along given texts.
        target_ids: ``[draft_vocab]`` the target's ids of the tokens that it can propose.
        facts: what the draft is, for display, ``training.json`` and the card.
        write: writes the files of the draft, without its card, to a folder.
    """

    task: DraftTask
    is_matrix: Callable[[str], bool]
    chain_logits: ChainLogits
    target_ids: Tensor
    facts: Mapping[str, Any]
    write: Callable[[Path], None]


class Recipe(Protocol):
    """How one kind of draft is trained."""

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's states that are read, for its number of layers."""

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """Create the draft at the beginning of its training.

        Args:
            teacher: the target.
            collected: documents of the run.
            rows: the training documents, packed.
            schedule: the run's schedule.

        Raises:
            DraftwiseError: the draft cannot be made for this target.
        """

    def card(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        """Title and introduction of the model card."""
