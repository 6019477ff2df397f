"""Export the trained family for distribution: ``python -m draftwise.zoo.export --runs RUNS``.

Each finished stage becomes a folder with bfloat16 weights, configuration, tokenizer and model card.
The scores on the card are measured with the exported weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftwise.devices import resolve_device
from draftwise.zoo.cards import Evaluation, model_card
from draftwise.zoo.distill import sample_continuations
from draftwise.zoo.evaluation import acceptances, mean_acceptance, validation_losses
from draftwise.zoo.recipe import STAGES, Stage
from draftwise.zoo.token_corpus import Corpus, load_corpus
from draftwise.zoo.token_stream import PackedStream, TokenRows
from draftwise.zoo.tokenizer import load_tokenizer

WEIGHTS = Path(__file__).parent / "weights"
_PROMPT_LENGTH = 128
_CONTINUATION_LENGTH = 256
_NUM_CONTINUATIONS = 96
# Machine-specific fields that transformers saves.
_MACHINE_KEYS = ("is_local", "local_files_only", "backend")


def _load(runs: Path, name: str, device: torch.device) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(str(runs / name / "model"), dtype=torch.bfloat16)
    return model.to(device).eval()


def _target_continuations(target: LlamaForCausalLM, stage: Stage, corpus: Corpus) -> TokenRows:
    prompts = PackedStream(corpus.held_out, stage.mixture, seed=0)
    rows = prompts.rows(_NUM_CONTINUATIONS, _PROMPT_LENGTH - 1)
    return sample_continuations(target, rows, _CONTINUATION_LENGTH, seed=0)


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key not in _MACHINE_KEYS}
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_model(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    """Replace ``folder`` by one exported model."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(str(temporary))
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
    corpus = load_corpus(runs, None, tokenizer, tuple(STAGES["target"].mixture))
    continuations = _target_continuations(target, STAGES["target"], corpus)
    for name, stage in STAGES.items():
        metrics_path = runs / name / "metrics.json"
        if not metrics_path.exists():
            print(f"{name}: not finished, skipped")
            continue
        model = target if name == "target" else _load(runs, name, device)
        losses = validation_losses(model, corpus.held_out, stage.mixture, max_tokens=131_072)
        acceptance = None
        if name != "target":
            acceptance = acceptances(
                model, target, corpus.held_out, stage.mixture, max_tokens=32_768
            )
            acceptance["acceptance/continuations"] = mean_acceptance(
                model, target, continuations, first=_PROMPT_LENGTH - 1
            )
        metrics = json.loads(metrics_path.read_text(encoding="utf-8"))
        # A manual remark about the run, such as an interruption, is added to the card.
        remark_path = runs / name / "remark.md"
        remark = remark_path.read_text(encoding="utf-8") if remark_path.exists() else ""
        evaluation = Evaluation(losses, acceptance)
        card = model_card(stage, model.config, metrics, evaluation, remark)
        write_model(destination / name, model, tokenizer, card)
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
