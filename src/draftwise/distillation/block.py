"""``draftwise train dflash`` and ``dspark``: how heads that draft blocks are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftwise.checkpoints.draft_folder import write_draft
from draftwise.checkpoints.heads import public_name
from draftwise.distillation.block_head import BlockHead
from draftwise.distillation.block_start import (
    default_states,
    mask_token,
    new_block_head,
    shares_projection,
)
from draftwise.distillation.block_task import BlockTask, chain_logits_of_block
from draftwise.distillation.card import CardTexts
from draftwise.distillation.confidence import calibrate
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows, choose_draft_tokens
from draftwise.distillation.recipe import Prepared, Recipe
from draftwise.distillation.speculators import common_config, head_tensors
from draftwise.distillation.teacher import Teacher
from draftwise.errors import InvalidParameterError
from draftwise.training.schedule import Schedule

# Projections to the vocabulary and parts of the Markov head that are not matrices for Muon.
_NOT_FOR_MUON = ("markov_head.", "confidence_head.")


class DFlashRecipe(Recipe):
    """Trains a new head of DFlash."""

    label = "DFlash"

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`Recipe`.

        Raises:
            InvalidParameterError: a state is that of the target's last layer.
        """
        settings = self.settings
        layers = settings.layers or default_states(num_layers, settings.num_layers)
        # Targets whose layers are not found are refused with the reason later.
        if num_layers and layers[-1] == num_layers:
            raise InvalidParameterError(
                "layers",
                f"must be before the output of the target's last layer, {num_layers}, which is "
                "normalised in one engine and not in another",
            )
        return layers

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`Recipe`."""
        settings = self.settings
        target_ids = choose_draft_tokens(
            collected.training, settings.draft_vocab, teacher.vocab_size, collected.end_tokens
        )
        mask = mask_token([*collected.training, *collected.held_out], teacher.vocab_size)
        head = new_block_head(settings, teacher, target_ids, teacher.state_scale(rows), mask)
        chains = partial(chain_logits_of_block, head, teacher.embedding)
        stores_projection = not shares_projection(head, teacher)
        facts = {
            "kind": f"{self.label} head",
            "layers": list(teacher.layers),
            "num_layers": settings.num_layers,
            "num_parameters": head.num_parameters,
            "num_drafted": head.config.num_drafted,
            # The tokens of a block depend on each other only if there is a Markov head.
            "is_one_hot": head.markov_head is None,
        }

        def write(folder: Path) -> None:
            tensors = head.weights()
            if stores_projection:
                tensors["lm_head.weight"] = head.projection
            architectures = list(getattr(teacher.config, "architectures", None) or [])
            config = block_config_json(head, public_name(settings.target), architectures)
            write_draft(folder, config, head_tensors(tensors, target_ids, teacher.vocab_size))

        prepared = Prepared(
            BlockTask(head, teacher, rows, target_ids, schedule, settings),
            lambda name: not name.startswith(_NOT_FOR_MUON),
            chains,
            target_ids,
            facts,
            write,
            is_one_hot=head.markov_head is None,
        )
        return self.completed(prepared, head, teacher)

    def completed(self, prepared: Prepared, head: BlockHead, teacher: Teacher) -> Prepared:
        """Add what a kind of head has beside the others."""
        return prepared

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`Recipe`."""
        target = facts["target"]
        layers = ", ".join(map(str, facts["layers"]))
        return CardTexts(
            f"{self.label} head for {target}",
            f"A drafting head with {facts['num_parameters']:,} parameters in "
            f"{facts['num_layers']} layer{'s' * (facts['num_layers'] > 1)}. It reads the hidden "
            f"states {layers} of\n`{target}`, predicts up to {facts['num_drafted']} tokens in one "
            f"pass, and proposes {facts['draft_vocab']:,} of its {facts['target_vocab']:,} tokens. "
            "The\nfolder has the layout of `speculators`, which other engines read too.",
            is_one_hot=facts["is_one_hot"],
        )


class DSparkRecipe(DFlashRecipe):
    """Trains a new head of DSpark, and calibrates its confidence on held-out answers."""

    label = "DSpark"

    def completed(self, prepared: Prepared, head: BlockHead, teacher: Teacher) -> Prepared:
        """See :class:`DFlashRecipe`."""
        measure = partial(calibrate, head, teacher.embedding, prepared.target_ids)
        return replace(prepared, measure=measure)


def block_config_json(head: BlockHead, target: str, architectures: list[str]) -> dict[str, Any]:
    """The ``config.json`` of a head."""
    config = head.config
    found = {
        "architectures": ["DSparkSpeculator" if config.markov else "DFlashSpeculator"],
        **common_config(config, "qwen3", target, architectures, config.num_drafted),
        "aux_hidden_state_layer_ids": list(config.state_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": not config.discards_anchor,
    }
    if config.markov is not None:
        found |= {
            "markov_rank": config.markov.rank,
            "markov_head_type": str(config.markov.kind),
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
            "confidence_temperatures": [
                round(each, 4) for each in head.confidence_temperatures.tolist()
            ],
        }
    return found
