"""``draftwise train companion``: how a companion is distilled from the target.

A companion is a model like that of :mod:`draftwise.distillation.model`. It scores a draft by its
own distribution. It helps where it is closer to the target than the draft, and makes other errors.
It is therefore larger, and begins from other weights and another order of the data than a draft of
the same seed. The split into training and held-out prompts is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftwise.checkpoints.heads import public_name
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.information import CompanionMeasures
from draftwise.distillation.model import describe_model, prepare_model
from draftwise.distillation.recipe import CardTexts, Prepared
from draftwise.distillation.scored_draft import find_draft
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.teacher import Teacher
from draftwise.training.schedule import Schedule

# Added to the seed of the weights and of the order of the data.
_SEED_OFFSET = 1_000


class CompanionRecipe:
    """Trains a new Llama as a companion, and measures what it knows of a draft."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """Find the draft, if one is named.

        Args:
            settings: settings of the run.
            trust_remote_code: whether to run code that comes with the target or the draft.

        Raises:
            DraftwiseError: the draft is not found, or cannot be measured.
        """
        self._settings = settings
        self._trust_remote_code = trust_remote_code
        self._draft = None
        if settings.draft is not None:
            self._draft = find_draft(
                settings.draft, settings.target, settings.length, trust_remote_code
            )

    def check(self, config: Any) -> None:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        if self._draft is not None:
            self._draft.check(config)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`draftwise.distillation.recipe.Recipe`; the states that a head reads."""
        return () if self._draft is None else self._draft.layers(num_layers)

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        settings = self._settings
        seed = settings.seed + _SEED_OFFSET
        prepared = prepare_model(
            settings, teacher, collected, rows, schedule, seed, self._trust_remote_code
        )
        facts: dict[str, Any] = {**prepared.facts, "kind": "companion"}
        draft = None
        if self._draft is not None:
            draft = self._draft.load(teacher)
            facts["draft_parameters"] = draft.num_parameters
        return replace(
            prepared,
            facts=facts,
            measure=CompanionMeasures(prepared.chain_logits, draft, seed),
        )

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        draft = self._settings.draft
        shown = "path/of/the/draft" if draft is None else public_name(draft)
        return CardTexts(
            f"Companion for {facts['target']}",
            describe_model(facts),
            "A companion proposes no tokens. It reads those of a draft, and a policy decides from "
            "its distributions\nwhich of them the target checks. It changes the speed of the "
            "output and not its distribution.",
            f'draft="{shown}", companion="path/of/this/folder"',
            "companion",
        )
