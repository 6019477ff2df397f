"""What a training run knows of the kind of draft or companion that it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows, RowStream
from draftwise.distillation.evaluation import ChainLogits, HeldOut
from draftwise.distillation.teacher import Teacher
from draftwise.training.loop import Task
from draftwise.training.schedule import Schedule


class DraftTask(Task, Protocol):
    """A task on packed documents."""

    stream: RowStream


@dataclass(frozen=True)
class Prepared:
    """A draft or companion that is ready to be trained.

    Attributes:
        task: what is trained.
        is_matrix: whether Muon trains the matrix of this name.
        chain_logits: what it proposes along given texts.
        target_ids: ``[draft_vocab]`` the target's ids of the tokens that it can propose.
        facts: what the draft is, for display, ``training.json`` and the card.
        write: writes its files, without the card, to a folder.
        measure: what is measured on held-out answers beside the acceptance, by name.
    """

    task: DraftTask
    is_matrix: Callable[[str], bool]
    chain_logits: ChainLogits
    target_ids: Tensor
    facts: Mapping[str, Any]
    write: Callable[[Path], None]
    measure: Callable[[HeldOut], Mapping[str, float]] = lambda held_out: {}


@dataclass(frozen=True)
class CardTexts:
    """Texts of the model card.

    Attributes:
        title: title of the card.
        introduction: what was trained.
        role: what it does in speculative decoding, in a sentence.
        speculation: arguments of ``SpeculationConfig`` that use the folder.
        noun: ``"draft"`` or ``"companion"``.
    """

    title: str
    introduction: str
    role: str = (
        "The target checks every proposed token, so a draft changes the speed of the output and "
        "not its\ndistribution."
    )
    speculation: str = 'draft="path/of/this/folder"'
    noun: str = "draft"


class Recipe(Protocol):
    """How one kind of draft or companion is trained."""

    def check(self, config: Any) -> None:
        """Refuse a target before it answers prompts.

        Args:
            config: configuration of the target, or of its text part.

        Raises:
            DraftwiseError: a named draft does not fit it.
        """

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's states that are read, for its number of layers."""

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """Create what is trained, at the beginning of its training.

        Args:
            teacher: the target.
            collected: documents of the run.
            rows: the training documents, packed.
            schedule: the run's schedule.

        Raises:
            DraftwiseError: it cannot be made for this target.
        """

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """Texts of the model card.

        Args:
            facts: the entry ``"run"`` of ``training.json``.
        """
