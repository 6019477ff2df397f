"""What a training run knows of the kind of draft or companion that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwise.distillation.card import CardTexts
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.evaluation import ChainLogits, HeldOut
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.tasks import RowTask
from draftwise.distillation.teacher import Teacher
from draftwise.training.schedule import Schedule


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
        is_one_hot: whether the draft is served with one-hot proposals, see
            :meth:`HeldOut.acceptance`.
    """

    task: RowTask[Any]
    is_matrix: Callable[[str], bool]
    chain_logits: ChainLogits
    target_ids: Tensor
    facts: Mapping[str, Any]
    write: Callable[[Path], None]
    measure: Callable[[HeldOut], Mapping[str, float]] = lambda held_out: {}
    is_one_hot: bool = False


class Recipe(ABC):
    """How one kind of draft or companion is trained.

    Attributes:
        settings: settings of the run.
        trust_remote_code: whether to run code that comes with the target or a named draft.
    """

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """Create the recipe, and read the draft that the settings name.

        Raises:
            DraftwiseError: a named draft is not found, or cannot be read.
        """
        self.settings = settings
        self.trust_remote_code = trust_remote_code

    def check(self, config: Any) -> None:
        """Refuse a target before it answers prompts; without a named draft there is no reason.

        Args:
            config: configuration of the target, or of its text part.

        Raises:
            DraftwiseError: a named draft does not fit it.
        """
        return

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's states that are read, for its number of layers; by default none."""
        return ()

    @abstractmethod
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

    @abstractmethod
    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """Texts of the model card.

        Args:
            facts: the entry ``"run"`` of ``training.json``.
        """
