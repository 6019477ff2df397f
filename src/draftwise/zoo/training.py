"""Resumable training loop with bf16 autocast, Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from draftwise.zoo.packing import PackedStream
from draftwise.zoo.recipe import Schedule, Stage

# (logits of the student [rows, length, vocab], batch [rows, length + 1]) -> mean loss per token
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Runtime:
    """Execution settings of a run, which change its result by rounding only."""

    device: torch.device
    compile: bool = True
    checkpoint_seconds: float = 300.0
    log_seconds: float = 30.0
    evaluate_seconds: float = 600.0


def resolve_device(name: str) -> torch.device:
    """Return the device ``name``; ``auto`` is a GPU if one is available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def new_model(stage: Stage) -> LlamaForCausalLM:
    """Initialise the stage's model from its seed, in float32."""
    torch.manual_seed(stage.seed)
    model = LlamaForCausalLM(stage.shape.config())
    # Layers start with zero output, so gradients are well scaled from the first step.
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Cross entropy in nats per token. logits: [rows, length, vocab]; batch: [rows, length + 1]."""
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


class Trainer:
    """Trains one model along a :class:`Schedule`, with checkpoints in ``folder``.

    If the folder has a checkpoint, training resumes from it.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        schedule: Schedule,
        stream: PackedStream,
        folder: Path,
        runtime: Runtime,
        *,
        loss_function: LossFunction = next_token_loss,
        evaluate: Callable[[LlamaForCausalLM], Mapping[str, float]] | None = None,
    ) -> None:
        self.model = model.to(runtime.device)
        self.schedule = schedule
        self.stream = stream
        self.folder = folder
        self.runtime = runtime
        self.num_steps = 0
        self.num_tokens = 0
        self.elapsed_seconds = 0.0
        self._loss_function = loss_function
        self._evaluate = evaluate
        self._optimizers = self._make_optimizers()
        # Static shapes: a run has only two row lengths, and each is compiled separately.
        self._forward: Callable[..., Any] = (
            torch.compile(self._loss, dynamic=False) if runtime.compile else self._loss
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()

    @property
    def progress(self) -> float:
        """Completed fraction of the schedule, 0 … 1."""
        return self.schedule.progress(self.num_tokens, self.elapsed_seconds)

    def run(self, max_steps: int | None = None) -> None:
        """Train until the schedule ends, or for at most ``max_steps`` further steps."""
        last = time.monotonic()
        last_log, last_save, last_evaluation = last, last, last
        losses: list[float] = []
        logged_tokens = self.num_tokens
        while self.progress < 1.0 and max_steps != 0:
            losses.append(self._step())
            now = time.monotonic()
            self.elapsed_seconds += now - last
            last = now
            max_steps = None if max_steps is None else max_steps - 1
            if now - last_log >= self.runtime.log_seconds:
                speed = (self.num_tokens - logged_tokens) / (now - last_log)
                self._log({"loss": sum(losses) / len(losses), "tokens_per_second": speed})
                losses, logged_tokens, last_log = [], self.num_tokens, now
            if now - last_save >= self.runtime.checkpoint_seconds:
                self.save()
                last_save = now
            if self._evaluate and now - last_evaluation >= self.runtime.evaluate_seconds:
                self._log(dict(self._evaluate(self.model)))
                last_evaluation = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write a checkpoint, replacing the previous one atomically."""
        temporary = self.folder / "checkpoint.tmp"
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "stream": self.stream.state_dict(),
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "elapsed_seconds": self.elapsed_seconds,
        }
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def _restore(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.runtime.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.stream.load_state_dict(state["stream"])
        self.num_steps = state["num_steps"]
        self.num_tokens = state["num_tokens"]
        self.elapsed_seconds = state["elapsed_seconds"]

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.ndim == 2 and ".layers." in name
            (matrices if is_matrix else others).append(parameter)
        schedule = self.schedule
        return [
            torch.optim.Muon(
                matrices,
                lr=schedule.muon_learning_rate,
                weight_decay=schedule.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                others, lr=schedule.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            ),
        ]

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.runtime.device.type, torch.bfloat16):
            logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return self._loss_function(logits, batch)

    def _step(self) -> float:
        schedule = self.schedule
        progress = self.progress
        length = schedule.row_length(progress)
        num_rows = max(1, schedule.batch_tokens // length)
        micro_rows = max(1, min(num_rows, schedule.micro_batch_tokens // length))
        num_micro_batches = max(1, num_rows // micro_rows)
        factor = schedule.learning_rate_factor(progress)
        for optimizer, peak in zip(
            self._optimizers,
            (schedule.muon_learning_rate, schedule.adamw_learning_rate),
            strict=True,
        ):
            optimizer.param_groups[0]["lr"] = peak * factor
        self.model.train()
        total = 0.0
        for _ in range(num_micro_batches):
            batch = torch.from_numpy(self.stream.rows(micro_rows, length)).to(self.runtime.device)
            loss = self._forward(batch) / num_micro_batches
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), schedule.gradient_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        self.num_tokens += num_micro_batches * micro_rows * length
        return total

    def _log(self, values: Mapping[str, float]) -> None:
        record = {
            "step": self.num_steps,
            "tokens": self.num_tokens,
            "minutes": round(self.elapsed_seconds / 60, 2),
            "progress": round(self.progress, 4),
            **{name: round(value, 4) for name, value in values.items()},
        }
        line = json.dumps(record)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        print(line, flush=True)
