"""``draftwise train model``: how a small Llama is distilled from the target.

The objective is DistillSpec's (Zhou et al., arXiv:2310.08461) with fixed data: at every position of
the target's answers, the draft learns the target's distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftwise.distillation.card import CardTexts
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.recipe import Prepared, Recipe
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.target import rope_theta
from draftwise.distillation.tasks import PositionTask, along_text
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.models.loading import load_tokenizer
from draftwise.training.llama import is_layer_matrix, new_llama
from draftwise.training.losses import LOSSES
from draftwise.training.schedule import Schedule

_HEAD_SIZE = 64


class ModelRecipe(Recipe):
    """Trains a new Llama with the target's vocabulary and tied embeddings."""

    @property
    def seed(self) -> int:
        """Seed of the weights and of the order of the rows."""
        return self.settings.seed

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`Recipe`."""
        settings = self.settings
        tokenizer = load_tokenizer(settings.target, "target", self.trust_remote_code)
        config = model_config(settings, teacher, collected.end_tokens)
        model = new_llama(config, self.seed).to(teacher.device)
        facts = {
            "kind": "Llama",
            "num_parameters": model.num_parameters(),
            "num_layers": settings.num_layers,
            "hidden_size": settings.hidden_size,
        }

        def write(folder: Path) -> None:
            model.save_pretrained(str(folder))
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))

        return Prepared(
            ModelTask(model, teacher, rows, schedule, LOSSES[settings.loss], self.seed),
            is_layer_matrix,
            partial(chain_logits_of_model, model),
            torch.arange(teacher.vocab_size),
            facts,
            write,
        )

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`Recipe`."""
        layers = "1 layer" if facts["num_layers"] == 1 else f"{facts['num_layers']} layers"
        return CardTexts(
            f"Draft for {facts['target']}",
            f"A Llama with {facts['num_parameters']:,} parameters in {layers} of size "
            f"{facts['hidden_size']}, and the vocabulary of\n`{facts['target']}`.",
        )


def model_config(
    settings: TrainingSettings, teacher: Teacher, end_tokens: frozenset[int]
) -> LlamaConfig:
    """Configuration of a small Llama with the target's vocabulary and tied embeddings."""
    num_heads = max(1, settings.hidden_size // _HEAD_SIZE)
    return LlamaConfig(
        vocab_size=teacher.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=-(-8 * settings.hidden_size // 3 // 32) * 32,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=next(n for n in (4, 3, 2, 1) if num_heads % n == 0 and n <= num_heads),
        head_dim=min(_HEAD_SIZE, settings.hidden_size),
        max_position_embeddings=int(teacher.config.max_position_embeddings),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(teacher.config)},
        tie_word_embeddings=True,
        initializer_range=0.03,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=sorted(end_tokens) or None,
    )


class ModelTask(PositionTask[LlamaForCausalLM]):
    """Trains a model on the target's distributions."""

    def logits(self, rows: Rows, reading: Reading, mask: Tensor) -> Tensor:
        """See :class:`PositionTask`."""
        with reading.autocast():
            logits: Tensor = self.model.lm_head(_hidden(self.model, rows)[mask])
        return logits


def chain_logits_of_model(
    model: LlamaForCausalLM,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """What a model proposes along given texts, which it reads alone.

    With a model, it is a :data:`draftwise.distillation.evaluation.ChainLogits`.
    """
    model.eval()
    with reading.autocast():
        for hidden in along_text(_hidden(model, rows), begins, num_steps):
            yield model.lm_head(hidden)


def _hidden(model: LlamaForCausalLM, rows: Rows) -> Tensor:
    """``[rows, length, hidden]`` each document on its own."""
    output = model.model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden
