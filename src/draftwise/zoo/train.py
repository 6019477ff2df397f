"""Train the bundled family: ``python -m draftwise.zoo.train --data DIR --out RUNS``.

Every stage writes ``RUNS/<stage>/model`` (float32) and ``RUNS/<stage>/metrics.json``. Running the
same command again skips finished stages and resumes unfinished ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draftwise.devices import fast_dtype, resolve_device
from draftwise.training.loop import Runtime, Trainer
from draftwise.training.schedule import Schedule
from draftwise.zoo.bundled import TOKENIZER_FILES, resolve
from draftwise.zoo.evaluation import by_source, mean_loss
from draftwise.zoo.models import new_model, save_model
from draftwise.zoo.recipe import STAGES, Stage
from draftwise.zoo.tokenizer import ensure_tokenizer
from draftwise.zoo.tokens import Corpus, PackedStream, load_corpus
from draftwise.zoo.training import TextTask, distillation_trainer, text_trainer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m draftwise.zoo.train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data files")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and checkpoints")
    parser.add_argument("--stage", choices=["tokenizer", *STAGES, "all"], default="all")
    parser.add_argument(
        "--tokens", type=int, help="training tokens of the stage; default: the recipe's"
    )
    parser.add_argument("--minutes", type=float, help="end the schedule after this wall time")
    parser.add_argument("--batch-tokens", type=int, help="tokens per optimizer step")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens per forward pass")
    parser.add_argument(
        "--bundled-target",
        action="store_true",
        help="train for the bundled target, with its tokenizer, instead of a target of this run",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    return parser


def configure_stage(stage: Stage, arguments: argparse.Namespace) -> Stage:
    """Apply the command line's overrides to a stage of the recipe.

    Tokens and minutes are divided between training on text and distillation in the proportion of
    the recipe's tokens.
    """
    distillation = stage.distillation
    all_tokens = stage.schedule.tokens + (distillation.schedule.tokens if distillation else 0)
    scale = (arguments.tokens or all_tokens) / all_tokens

    def configured(schedule: Schedule) -> Schedule:
        changes: dict[str, Any] = {"tokens": max(1, round(schedule.tokens * scale))}
        for name in ("batch_tokens", "micro_batch_tokens"):
            if getattr(arguments, name) is not None:
                changes[name] = getattr(arguments, name)
        if arguments.minutes is not None:
            changes["minutes"] = arguments.minutes * schedule.tokens / all_tokens
        return replace(schedule, **changes)

    if distillation is not None:
        distillation = replace(distillation, schedule=configured(distillation.schedule))
    return replace(stage, schedule=configured(stage.schedule), distillation=distillation)


def use_bundled_target(runs: Path) -> None:
    """Put the bundled target and its tokenizer where a run would have written them."""
    shutil.copytree(resolve("target"), runs / "target" / "model", dirs_exist_ok=True)
    (runs / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(runs / "target" / "model" / name, runs / "tokenizer" / name)


def _teacher(stage: Stage, runs: Path, runtime: Runtime) -> LlamaForCausalLM | None:
    if stage.distillation is None:
        return None
    return LlamaForCausalLM.from_pretrained(
        str(runs / stage.distillation.teacher / "model"), dtype=fast_dtype(runtime.device)
    )


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

    def losses_of(model: PreTrainedModel, max_tokens: int) -> dict[str, float]:
        score = partial(mean_loss, model)
        return by_source("loss", score, corpus.held_out, stage.mixture, max_tokens)

    def evaluate(model: PreTrainedModel) -> dict[str, float]:
        losses = losses_of(model, 32_768)
        return {f"validation/{name}": loss for name, loss in losses.items()}

    teacher = _teacher(stage, runs, runtime)
    model = new_model(stage, teacher)
    print(f"{stage.name}: {model.num_parameters():,} parameters", flush=True)
    stream = PackedStream(corpus.training, stage.mixture, stage.seed)
    trainers = [text_trainer(model, stage.schedule, stream, folder, runtime, evaluate)]
    trainers[0].run()
    if stage.distillation is not None:
        assert teacher is not None
        second = distillation_trainer(
            model,
            teacher,
            stage,
            stage.distillation,
            corpus,
            folder / "distillation",
            runtime,
            evaluate,
        )
        second.run()
        trainers.append(second)
    losses = losses_of(model, 131_072)
    print(json.dumps({name: round(loss, 4) for name, loss in losses.items()}), flush=True)
    save_model(model, folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    _write_metrics(folder, model, trainers, losses, command)


def _write_metrics(
    folder: Path,
    model: PreTrainedModel,
    trainers: Sequence[Trainer],
    losses: dict[str, float],
    command: Sequence[str],
) -> None:
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    command = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(command)
    torch.set_float32_matmul_precision("high")
    runs: Path = arguments.out
    if arguments.bundled_target:
        use_bundled_target(runs)
    tokenizer = ensure_tokenizer(runs, arguments.data)
    print(f"tokenizer: {len(tokenizer)} tokens", flush=True)
    if arguments.stage == "tokenizer":
        return
    runtime = Runtime(resolve_device(arguments.device), compile=not arguments.no_compile)
    for name in STAGES if arguments.stage == "all" else [arguments.stage]:
        stage = configure_stage(STAGES[name], arguments)
        corpus = load_corpus(runs, arguments.data, tokenizer, stage.mixture)
        train_stage(stage, corpus, runs, runtime, tokenizer, command)


if __name__ == "__main__":
    main()
