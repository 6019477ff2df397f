"""Export the trained family for distribution: ``python -m draftwise.zoo.export --runs RUNS``.

Each finished stage becomes a folder with bfloat16 weights, configuration, tokenizer and model card.
In the package itself the tokenizer is stored once, with the target. The scores on the card are
measured with the exported weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftwise.devices import resolve_device
from draftwise.zoo.cards import model_card
from draftwise.zoo.evaluation import by_source, mean_acceptance, mean_loss, mean_mtp_acceptance
from draftwise.zoo.hybrid import Hybrid
from draftwise.zoo.models import load_model, save_model
from draftwise.zoo.recipe import STAGES
from draftwise.zoo.tokenizer import load_tokenizer
from draftwise.zoo.tokens import PackedStream, load_corpus
from draftwise.zoo.training import sample_continuations

WEIGHTS = Path(__file__).parent / "weights"
_PROMPT_LENGTH = 128
_CONTINUATION_LENGTH = 256
_NUM_CONTINUATIONS = 96
# Machine-specific fields that transformers saves.
_MACHINE_KEYS = ("is_local", "local_files_only", "backend")


def _load(runs: Path, name: str, device: torch.device) -> PreTrainedModel:
    model = load_model(STAGES[name], runs / name / "model", torch.bfloat16)
    return model.to(device).eval()


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key not in _MACHINE_KEYS}
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, card: str
) -> None:
    """Replace ``folder`` by one exported model, with a tokenizer if one is given."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_model(model, temporary)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, temporary)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    for path in temporary.iterdir():
        path.chmod(0o644)
    temporary.rename(folder)


def export(runs: Path, destination: Path, device: torch.device) -> None:
    """Export every finished stage of ``runs`` to ``destination``; the target must be finished."""
    tokenizer = load_tokenizer(runs)
    target = _load(runs, "target", device)
    corpus = load_corpus(runs, None, tokenizer, STAGES["target"].mixture)
    prompts = PackedStream(corpus.held_out, STAGES["target"].mixture, seed=0)
    continuations = sample_continuations(
        target,
        prompts.rows(_NUM_CONTINUATIONS, _PROMPT_LENGTH - 1),
        _CONTINUATION_LENGTH,
        seed=0,
    )
    for name, stage in STAGES.items():
        metrics_path = runs / name / "metrics.json"
        if not metrics_path.exists():
            print(f"{name}: not finished, skipped")
            continue
        model = target if name == "target" else _load(runs, name, device)
        losses = by_source(
            "loss", partial(mean_loss, model), corpus.held_out, stage.mixture, 131_072
        )
        acceptance = None
        if name != "target":
            score = partial(mean_acceptance, model, target)
            acceptance = by_source("acceptance", score, corpus.held_out, stage.mixture, 32_768)
            acceptance["acceptance/continuations"] = mean_acceptance(
                model, target, continuations, first=_PROMPT_LENGTH - 1
            )
        mtp_acceptance = None
        if isinstance(model, Hybrid):
            mtp = by_source(
                "mtp", partial(mean_mtp_acceptance, model), corpus.held_out, stage.mixture, 32_768
            )
            mtp_acceptance = mtp["mtp"]
        metrics = json.loads(metrics_path.read_text(encoding="utf-8"))
        # A manual remark about the run, such as an interruption, is added to the card.
        remark_path = runs / name / "remark.md"
        remark = remark_path.read_text(encoding="utf-8") if remark_path.exists() else ""
        card = model_card(stage, model.config, metrics, losses, acceptance, mtp_acceptance, remark)
        is_shared = destination == WEIGHTS and name != "target"
        write_model(destination / name, model, None if is_shared else tokenizer, card)
        scores = {key: round(value, 4) for key, value in {**losses, **(acceptance or {})}.items()}
        print(f"{name}: {json.dumps(scores)}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m draftwise.zoo.export", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="output folder of the training")
    parser.add_argument("--destination", type=Path, default=WEIGHTS, help="default: the package")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    arguments = parser.parse_args(argv)
    export(arguments.runs, arguments.destination, resolve_device(arguments.device))


if __name__ == "__main__":
    main()
