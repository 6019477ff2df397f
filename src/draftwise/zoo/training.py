"""Training of the family's models: on packed text, and by distillation from the target.

The distillation follows DistillSpec (Zhou et al., arXiv:2310.08461). A small model learns the
target's distribution at every position with the forward KL divergence,
D(p ‖ q) = Σ p (log p - log q), at temperature 1. The data are fixed, which is one of the paper's
variants. Some rows are training text, and the others are continuations sampled from the target, as
these are the contexts that a draft has in use. The paper's on-policy variant, in which the draft
samples the continuations, is not used.

``draftwise train model`` has the same loss, optimisers and loop, but other data: answers to prompts
that are written out in full, each attending to itself only, at several temperatures. The bundled
weights come from rows of text and continuations at temperature 1, so the recipe is kept apart to
stay the one that they were made with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftwise.devices import has_fast_bfloat16
from draftwise.training.llama import is_layer_matrix
from draftwise.training.loop import Runtime, Trainer
from draftwise.training.losses import kl_divergence
from draftwise.training.optimizers import Optimizers
from draftwise.training.schedule import Schedule
from draftwise.zoo.hybrid import Hybrid
from draftwise.zoo.recipe import Distillation, Stage
from draftwise.zoo.tokens import Corpus, PackedStream, TokenRows, Tokens, joined

CONTINUATIONS = "continuations"
# Added to the seed for another order of the rows than in the training on text.
_SEED_OFFSET = 1_000
# Weight of the loss of the token after the next one.
MTP_WEIGHT = 0.3
_ROWS_PER_BATCH = {"cpu": 128, "cuda": 4_096}

# (logits of the student [rows, length, vocab], batch [rows, length + 1]) -> mean loss per token
LossFunction = Callable[[Tensor, Tensor], Tensor]
Evaluate = Callable[[PreTrainedModel], Mapping[str, float]]


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Cross entropy in nats per token. logits: [rows, length, vocab]; batch: [rows, length + 1]."""
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def forward_kl(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Mean of D(p ‖ q) in nats per token. Both [rows, length, vocab]; p is the teacher's."""
    losses, _ = kl_divergence(logits.float(), teacher_logits.float().softmax(dim=-1))
    return losses.mean()


class TextTask:
    """A causal language model and its stream of rows of text.

    Attributes:
        model: the trained model.
        stream: the rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: Schedule,
        stream: PackedStream,
        runtime: Runtime,
        loss_function: LossFunction,
    ) -> None:
        """Move the model to the device of the run."""
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
            if isinstance(self.model, Hybrid):
                return self._loss_of_both(*self.model.both(batch[:, :-1]), batch)
            logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return self._loss_function(logits, batch)

    def _loss_of_both(self, logits: Tensor, second: Tensor, batch: Tensor) -> Tensor:
        """The loss of the next token, and that of the MTP layer, which learns to be the model."""
        own = forward_kl(second, logits[:, 1:].detach())
        return self._loss_function(logits, batch) + MTP_WEIGHT * own


def text_trainer(
    model: PreTrainedModel,
    schedule: Schedule,
    stream: PackedStream,
    folder: Path,
    runtime: Runtime,
    evaluate: Evaluate | None = None,
    loss_function: LossFunction = next_token_loss,
) -> Trainer:
    """A trainer of a model on rows of text, with checkpoints in ``folder``."""
    task = TextTask(model, schedule, stream, runtime, loss_function)
    optimizers = Optimizers(task.model, _is_matrix, schedule)
    score = None if evaluate is None else lambda: evaluate(model)
    return Trainer(task, optimizers, schedule, folder, runtime, evaluate=score)


def _is_matrix(name: str) -> bool:
    """Whether Muon trains a matrix: those of layers, the MTP layer among them."""
    return is_layer_matrix(name) or name.startswith("mtp.")


def distillation_trainer(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    stage: Stage,
    plan: Distillation,
    corpus: Corpus,
    folder: Path,
    runtime: Runtime,
    evaluate: Evaluate | None = None,
) -> Trainer:
    """Return a trainer that distils ``teacher`` into ``model``, with the same vocabulary.

    Args:
        model: the student.
        teacher: the target of the family.
        stage: the student's stage.
        plan: the stage's distillation.
        corpus: tokens of all sources.
        folder: folder of the checkpoints and of the continuations.
        runtime: execution settings.
        evaluate: called with the student from time to time.
    """
    teacher = teacher.to(runtime.device).eval().requires_grad_(False)
    text_weight = sum(stage.mixture.values())
    share = plan.continuation_share
    mixture = {name: (1 - share) * weight / text_weight for name, weight in stage.mixture.items()}
    sources = {**corpus.training}
    if share:
        mixture[CONTINUATIONS] = share
        sources[CONTINUATIONS] = _continuations(teacher, stage, plan, corpus, folder)

    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher(input_ids=batch[:, :-1], use_cache=False).logits
        return forward_kl(logits, teacher_logits)

    stream = PackedStream(sources, mixture, stage.seed + _SEED_OFFSET)
    return text_trainer(model, plan.schedule, stream, folder, runtime, evaluate, loss)


def _continuations(
    teacher: PreTrainedModel, stage: Stage, plan: Distillation, corpus: Corpus, folder: Path
) -> Tokens:
    """The teacher's continuations of training text, sampled once and kept in ``folder``."""
    path = folder / "continuations.npy"
    if not path.exists():
        started = time.monotonic()
        prompts = PackedStream(corpus.training, stage.mixture, stage.seed + _SEED_OFFSET)
        rows = sample_continuations(
            teacher,
            prompts.rows(plan.num_continuations, plan.prompt_length - 1),
            plan.continuation_length,
            stage.seed,
        )
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "continuations.tmp.npy"
        np.save(temporary, rows)
        temporary.replace(path)
        print(f"sampled {rows.shape} tokens in {time.monotonic() - started:.0f} s", flush=True)
    return joined(np.load(path).tolist())


@torch.no_grad()
def sample_continuations(
    model: PreTrainedModel, prompts: TokenRows, num_tokens: int, seed: int
) -> TokenRows:
    """Continue every prompt by ``num_tokens`` tokens at temperature 1, end-of-text included.

    prompts: [num_rows, length] -> [num_rows, length + num_tokens].
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)
    model.eval()
    finished = []
    rows_per_batch = _ROWS_PER_BATCH.get(model.device.type, _ROWS_PER_BATCH["cpu"])
    for first in range(0, len(prompts), rows_per_batch):
        inputs = torch.from_numpy(prompts[first : first + rows_per_batch]).to(model.device)
        pieces, cache = [inputs], None
        for _ in range(num_tokens):
            output = model(
                input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            p = output.logits[:, -1].float().softmax(-1)
            inputs = torch.multinomial(p, 1, generator=generator)
            pieces.append(inputs)
        finished.append(torch.cat(pieces, dim=1).cpu().numpy())
    return np.concatenate(finished)
