"""Train the bundled family: ``python -m draftwise.zoo.train --data DIR --out RUNS``.

Every stage writes ``RUNS/<stage>/model`` (float32) and ``RUNS/<stage>/metrics.json``. Running the
same command again skips finished stages and resumes unfinished ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftwise.devices import fast_dtype, resolve_device
from draftwise.training.loop import Runtime, Trainer
from draftwise.training.schedule import Schedule
from draftwise.zoo.distill import distillation_trainer
from draftwise.zoo.evaluation import validation_losses
from draftwise.zoo.recipe import STAGES, Stage
from draftwise.zoo.token_corpus import Corpus, load_corpus
from draftwise.zoo.token_stream import PackedStream
from draftwise.zoo.tokenizer import ensure_tokenizer
from draftwise.zoo.training import TextTask, new_model, text_trainer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m draftwise.zoo.train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data files")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and checkpoints")
    parser.add_argument("--stage", choices=["tokenizer", *STAGES, "all"], default="all")
    parser.add_argument(
        "--tokens", type=int, help="training tokens of the stage; default: the recipe's"
    )
    parser.add_argument(
        "--steps", type=int, help="training steps of the stage, instead of --tokens"
    )
    parser.add_argument("--minutes", type=float, help="end the schedule after this wall time")
    parser.add_argument("--batch-tokens", type=int, help="tokens per optimizer step")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens per forward pass")
    parser.add_argument("--width", type=int, default=1, help="multiply hidden size, heads and MLP")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    return parser


def configure_schedule(
    schedule: Schedule, arguments: argparse.Namespace, *, scale: float, minutes_share: float
) -> Schedule:
    """Apply the command line's overrides to one schedule of a stage.

    ``scale`` multiplies the recipe's tokens. ``minutes_share`` is this schedule's fraction of the
    time.
    """
    changes: dict[str, Any] = {"tokens": max(1, round(schedule.tokens * scale))}
    for name in ("batch_tokens", "micro_batch_tokens"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    if arguments.minutes is not None:
        changes["minutes"] = arguments.minutes * minutes_share
    return replace(schedule, **changes)


def configure_stage(stage: Stage, arguments: argparse.Namespace) -> Stage:
    """Apply the command line's overrides to a stage of the recipe.

    Tokens and minutes are divided between training on text and distillation in the proportion of
    the recipe's tokens.
    """
    shape, distillation = stage.shape, stage.distillation
    width = arguments.width
    if width != 1:
        shape = replace(
            shape,
            hidden_size=shape.hidden_size * width,
            num_heads=shape.num_heads * width,
            num_kv_heads=shape.num_kv_heads * width,
            intermediate_size=shape.intermediate_size * width,
        )
    all_tokens = stage.schedule.tokens + (distillation.schedule.tokens if distillation else 0)
    tokens = arguments.tokens or all_tokens
    if arguments.steps is not None:
        tokens = arguments.steps * (arguments.batch_tokens or stage.schedule.batch_tokens)
    scale = tokens / all_tokens

    def configured(schedule: Schedule) -> Schedule:
        share = schedule.tokens / all_tokens
        return configure_schedule(schedule, arguments, scale=scale, minutes_share=share)

    if distillation is not None:
        distillation = replace(distillation, schedule=configured(distillation.schedule))
    return replace(
        stage, shape=shape, schedule=configured(stage.schedule), distillation=distillation
    )


def _epochs(trainers: Sequence[Trainer]) -> dict[str, float]:
    total: dict[str, float] = {}
    for trainer in trainers:
        assert isinstance(trainer.task, TextTask)
        for name, epochs in trainer.task.stream.epochs().items():
            total[name] = total.get(name, 0.0) + epochs
    return total


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type}, {torch.get_num_threads()} threads"


def _finish(
    model: LlamaForCausalLM,
    trainers: Sequence[Trainer],
    folder: Path,
    losses: dict[str, float],
    tokenizer: PreTrainedTokenizerFast,
    command: Sequence[str],
) -> None:
    model.save_pretrained(str(folder / "model"))
    tokenizer.save_pretrained(str(folder / "model"))
    metrics = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_tokens": sum(trainer.num_tokens for trainer in trainers),
        "num_text_tokens": trainers[0].num_tokens,
        "num_steps": sum(trainer.num_steps for trainer in trainers),
        "minutes": sum(trainer.elapsed_seconds for trainer in trainers) / 60,
        "epochs": _epochs(trainers),
        "validation": losses,
        "command": shlex.join(["python", "-m", "draftwise.zoo.train", *command]),
        "machine": _machine(trainers[-1].runtime.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    temporary = folder / "metrics.tmp"
    temporary.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "metrics.json")


def train_stage(
    stage: Stage,
    corpus: Corpus,
    runs: Path,
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    command: Sequence[str],
) -> None:
    """Train one model to the end of its schedule and write it to ``runs/<stage>``.

    ``command`` is the list of command line arguments, recorded for the model card.
    """
    folder = runs / stage.name
    if (folder / "metrics.json").exists():
        print(f"{stage.name}: already finished", flush=True)
        return

    def evaluate(model: LlamaForCausalLM) -> dict[str, float]:
        losses = validation_losses(model, corpus.held_out, stage.mixture)
        return {f"validation/{name}": loss for name, loss in losses.items()}

    model = new_model(stage)
    print(f"{stage.name}: {model.num_parameters():,} parameters", flush=True)
    stream = PackedStream(corpus.training, stage.mixture, stage.seed)
    trainer = text_trainer(model, stage.schedule, stream, folder, runtime, evaluate=evaluate)
    trainer.run()
    trainers = [trainer]
    if stage.distillation is not None:
        teacher = LlamaForCausalLM.from_pretrained(
            str(runs / stage.distillation.teacher / "model"), dtype=fast_dtype(runtime.device)
        )
        second = distillation_trainer(
            model, teacher, stage, corpus, folder / "distillation", runtime, evaluate
        )
        second.run()
        trainers.append(second)
    losses = validation_losses(model, corpus.held_out, stage.mixture, max_tokens=131_072)
    print(json.dumps({name: round(loss, 4) for name, loss in losses.items()}), flush=True)
    _finish(model, trainers, folder, losses, tokenizer, command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    command = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(command)
    torch.set_float32_matmul_precision("high")
    runs: Path = arguments.out
    tokenizer = ensure_tokenizer(runs, arguments.data)
    print(f"tokenizer: {len(tokenizer)} tokens", flush=True)
    if arguments.stage == "tokenizer":
        return
    runtime = Runtime(resolve_device(arguments.device), compile=not arguments.no_compile)
    names = list(STAGES) if arguments.stage == "all" else [arguments.stage]
    for name in names:
        stage = configure_stage(STAGES[name], arguments)
        corpus = load_corpus(runs, arguments.data, tokenizer, tuple(stage.mixture))
        train_stage(stage, corpus, runs, runtime, tokenizer, command)


if __name__ == "__main__":
    main()
