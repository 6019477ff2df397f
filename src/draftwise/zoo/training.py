"""Training of the family's models on packed text, with bfloat16 autocast where it is fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwise.devices import has_fast_bfloat16
from draftwise.training.llama import is_layer_matrix, new_llama
from draftwise.training.loop import Runtime, Trainer
from draftwise.training.optimizers import Optimizers
from draftwise.training.schedule import Schedule
from draftwise.zoo.recipe import Stage
from draftwise.zoo.token_stream import PackedStream

# (logits of the student [rows, length, vocab], batch [rows, length + 1]) -> mean loss per token
LossFunction = Callable[[Tensor, Tensor], Tensor]


def new_model(stage: Stage) -> LlamaForCausalLM:
    """Initialise the stage's model from its seed, in float32."""
    return new_llama(stage.shape.config(), stage.seed)


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Cross entropy in nats per token. logits: [rows, length, vocab]; batch: [rows, length + 1]."""
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


class TextTask:
    """A causal language model and its stream of rows of text.

    Attributes:
        model: the trained model.
        stream: the rows.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        schedule: Schedule,
        stream: PackedStream,
        runtime: Runtime,
        loss_function: LossFunction = next_token_loss,
    ) -> None:
        """Move the model to the device of the run.

        Args:
            model: the model.
            schedule: the run's schedule.
            stream: rows of text.
            runtime: execution settings.
            loss_function: mean loss of a micro-batch.
        """
        self.model = model.to(runtime.device)
        self.stream = stream
        self._schedule = schedule
        self._device = runtime.device
        self._loss_function = loss_function
        # Static shapes: a run has only two row lengths, and each is compiled separately.
        self._forward: Callable[..., Any] = (
            torch.compile(self._loss, dynamic=False) if runtime.compile else self._loss
        )

    def backward(self, progress: float) -> tuple[float, int]:
        """See :class:`draftwise.training.loop.Task`."""
        schedule = self._schedule
        length = schedule.row_length(progress)
        num_rows = max(1, schedule.batch_tokens // length)
        micro_rows = max(1, min(num_rows, schedule.micro_batch_tokens // length))
        num_micro_batches = max(1, num_rows // micro_rows)
        self.model.train()
        total = 0.0
        for _ in range(num_micro_batches):
            batch = torch.from_numpy(self.stream.rows(micro_rows, length)).to(self._device)
            loss = self._forward(batch) / num_micro_batches
            loss.backward()
            total += loss.item()
        return total, num_micro_batches * micro_rows * length

    def state_dict(self) -> dict[str, Any]:
        """Position in the text."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""
        self.stream.load_state_dict(state)

    def _loss(self, batch: Tensor) -> Tensor:
        use_bfloat16 = has_fast_bfloat16(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=use_bfloat16):
            logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return self._loss_function(logits, batch)


def text_trainer(
    model: LlamaForCausalLM,
    schedule: Schedule,
    stream: PackedStream,
    folder: Path,
    runtime: Runtime,
    *,
    loss_function: LossFunction = next_token_loss,
    evaluate: Callable[[LlamaForCausalLM], Mapping[str, float]] | None = None,
) -> Trainer:
    """A trainer of a model on rows of text, with checkpoints in ``folder``."""
    task = TextTask(model, schedule, stream, runtime, loss_function)
    optimizers = Optimizers(task.model, is_layer_matrix, schedule)
    score = None if evaluate is None else lambda: evaluate(model)
    return Trainer(task, optimizers, schedule, folder, runtime, evaluate=score)
