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

from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.positions import PositionTask
from draftwise.distillation.recipe import Prepared
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.start import rope_theta
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled import shifted
from draftwise.errors import InvalidParameterError
from draftwise.models.loading import load_tokenizer
from draftwise.training.initialisation import zero_layer_outputs
from draftwise.training.losses import LOSSES
from draftwise.training.schedule import Schedule

_HEAD_SIZE = 64


class ModelRecipe:
    """Trains a new Llama with the target's vocabulary and tied embeddings."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """Create the recipe.

        Args:
            settings: settings of the run.
            trust_remote_code: whether to run code that comes with the target's tokenizer.

        Raises:
            InvalidParameterError: the settings are those of a head.
        """
        if settings.start_from is not None:
            raise InvalidParameterError("start_from", "only heads can be continued")
        self._settings = settings
        self._trust_remote_code = trust_remote_code

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`draftwise.distillation.recipe.Recipe`; no hidden state is read."""
        return ()

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        settings = self._settings
        tokenizer = load_tokenizer(settings.target, "target", self._trust_remote_code)
        model = new_model(settings, teacher, collected.end_tokens)
        task = ModelTask(model, teacher, rows, schedule, LOSSES[settings.loss], settings.seed)
        facts = {
            "kind": "Llama",
            "num_parameters": model.num_parameters(),
            "num_layers": settings.num_layers,
            "hidden_size": settings.hidden_size,
        }
        return Prepared(
            task,
            lambda name: ".layers." in name,
            partial(_chain_logits, model, teacher),
            torch.arange(teacher.vocab_size),
            facts,
            partial(self._write, model, tokenizer),
        )

    def card(self, facts: Mapping[str, Any]) -> tuple[str, str]:
        """See :class:`draftwise.distillation.recipe.Recipe`."""
        target = facts["target"]
        layers = "1 layer" if facts["num_layers"] == 1 else f"{facts['num_layers']} layers"
        return (
            f"Draft for {target}",
            f"A Llama with {facts['num_parameters']:,} parameters in {layers} of size "
            f"{facts['hidden_size']}, and the vocabulary of\n`{target}`.",
        )

    def _write(self, model: LlamaForCausalLM, tokenizer: Any, folder: Path) -> None:
        model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


def new_model(
    settings: TrainingSettings, teacher: Teacher, end_tokens: frozenset[int]
) -> LlamaForCausalLM:
    """A Llama with random weights, in float32."""
    num_heads = max(1, settings.hidden_size // _HEAD_SIZE)
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
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
    model = LlamaForCausalLM(config)
    zero_layer_outputs(model)
    return model.to(teacher.device)


class ModelTask(PositionTask[LlamaForCausalLM]):
    """Trains a model on the target's distributions."""

    def logits(self, rows: Rows, reading: Reading, mask: Tensor) -> Tensor:
        """See :class:`draftwise.distillation.positions.PositionTask`."""
        with _autocast(self._teacher):
            logits: Tensor = self.model.lm_head(_hidden(self.model, rows)[mask])
        return logits


def _autocast(teacher: Teacher) -> torch.autocast:
    use_bfloat16 = teacher.projection.dtype == torch.bfloat16
    return torch.autocast(teacher.device.type, torch.bfloat16, enabled=use_bfloat16)


def _hidden(model: LlamaForCausalLM, rows: Rows) -> Tensor:
    """``[rows, length, hidden]`` each document on its own."""
    output = model.model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def _chain_logits(
    model: LlamaForCausalLM,
    teacher: Teacher,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """The draft reads the text itself, so a step's logits are those of a later position."""
    model.eval()
    with _autocast(teacher):
        hidden = _hidden(model, rows)
        for depth in range(num_steps):
            yield model.lm_head(shifted(hidden, depth + 1)[begins])
