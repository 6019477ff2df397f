"""Distillation of small models from the target, after DistillSpec (Zhou et al., arXiv:2310.08461).

A small model is trained to match the target's distribution at every position with the forward KL
divergence, D(p ‖ q) = Σ p (log p - log q), at temperature 1. The data are fixed, which is one of
the paper's variants. Some rows are training text, and the others are continuations sampled from the
target, as these are the contexts that a draft has in use. The paper's on-policy variant, in which
the draft samples the continuations, is not used.

``draftwise train model`` has the same loss, optimisers and loop, but other data: answers to prompts
that are written out in full, each attending to itself only, at several temperatures. The bundled
weights come from rows of text and continuations at temperature 1, so the recipe is kept apart to
stay the one that they were made with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwise.training.loop import Runtime, Trainer
from draftwise.training.losses import kl_divergence
from draftwise.zoo.recipe import END_OF_TEXT_ID, Distillation, Stage
from draftwise.zoo.token_corpus import Corpus
from draftwise.zoo.token_stream import PackedStream, TokenizedSource, TokenRows
from draftwise.zoo.training import text_trainer

CONTINUATIONS = "continuations"
_ROWS_PER_BATCH = {"cpu": 128, "cuda": 4_096}


def forward_kl(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Mean of D(p ‖ q) in nats per token. Both [rows, length, vocab]; p is the teacher's."""
    losses, _ = kl_divergence(logits.float(), teacher_logits.float().softmax(dim=-1))
    return losses.mean()


@torch.no_grad()
def sample_continuations(
    model: LlamaForCausalLM, prompts: TokenRows, num_tokens: int, seed: int
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


def _continuations(
    teacher: LlamaForCausalLM, stage: Stage, plan: Distillation, corpus: Corpus, folder: Path
) -> TokenizedSource:
    path = folder / "continuations.npy"
    if not path.exists():
        started = time.monotonic()
        # A different seed than in the text phase gives the prompts a different order.
        prompts = PackedStream(corpus.training, stage.mixture, stage.seed + 1_000)
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
    return TokenizedSource.from_documents(np.load(path).tolist(), END_OF_TEXT_ID)


def distillation_trainer(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    stage: Stage,
    corpus: Corpus,
    folder: Path,
    runtime: Runtime,
    evaluate: Callable[[LlamaForCausalLM], Mapping[str, float]] | None = None,
) -> Trainer:
    """Return a trainer that distils ``teacher`` into ``model``, with the same vocabulary.

    Raises ``ValueError`` if the stage has no distillation.
    """
    plan = stage.distillation
    if plan is None:
        raise ValueError(f"stage {stage.name} has no distillation")
    teacher = teacher.to(runtime.device).eval().requires_grad_(False)
    sources = {
        **corpus.training,
        CONTINUATIONS: _continuations(teacher, stage, plan, corpus, folder),
    }
    text_weight = sum(stage.mixture.values())
    share = plan.continuation_share
    mixture = {name: (1 - share) * weight / text_weight for name, weight in stage.mixture.items()}
    mixture[CONTINUATIONS] = share

    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher(input_ids=batch[:, :-1], use_cache=False).logits
        return forward_kl(logits, teacher_logits)

    stream = PackedStream(sources, mixture, stage.seed + 1_000)
    return text_trainer(
        model, plan.schedule, stream, folder, runtime, loss_function=loss, evaluate=evaluate
    )
