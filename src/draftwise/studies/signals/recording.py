"""Recorded drafts: the signals and the acceptance of every drafted token, at several samplings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from draftwise.engine.assembly import Models
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.estimators.records import Integers, Records
from draftwise.params import SamplingParams
from draftwise.profiling.acceptance import collect
from draftwise.speculation import SpeculationConfig
from draftwise.studies.sampling import Sampling
from draftwise.studies.workbench import Workbench, same_distribution

_AT_ONCE = 16
# Prompts between two writes of the checkpoint.
_PER_CHECKPOINT = 4
# Name of the target among the companions: S is then the overlap of draft and target.
TARGET = "target"


@dataclass(frozen=True)
class Recording:
    """Drafts of one sampling setting, all of the same length.

    A draft that was shorter, at the end of a text, is left out.

    Attributes:
        records: ``[drafts · length]`` the tokens, draft after draft, without S and A.
        companions: by companion, the same tokens with its S and A.
        prompts: ``[drafts]`` index of the prompt of each draft.
        length: number of tokens of each draft.
    """

    records: Records
    companions: Mapping[str, Records]
    prompts: Integers
    length: int

    @property
    def num_drafts(self) -> int:
        """Number of drafts."""
        return len(self.prompts)

    @property
    def has_confidence(self) -> bool:
        """Whether the draft's own head estimated acceptance."""
        return bool((self.records.confidence > 0).any())


def whole_drafts(
    records: Records, companions: Mapping[str, Records], prompts: Integers, length: int
) -> Recording:
    """Keep the drafts that have the full length.

    Args:
        records: drafted tokens, draft after draft.
        companions: the same tokens with S and A of each companion.
        prompts: ``[num_tokens]`` prompt of each token.
        length: the full length.

    Raises:
        InvalidParameterError: there are too few drafts.
    """
    starts = np.flatnonzero(records.position == 0)
    lengths = np.diff(np.append(starts, len(records)))
    starts = starts[lengths >= length]
    chosen = (starts[:, None] + np.arange(length)).ravel()
    if len(np.unique(prompts[starts])) < 2:
        raise InvalidParameterError(
            "max_tokens",
            "too few for whole drafts of two prompts; increase it, or use more prompts",
        )
    return Recording(
        records.take(chosen),
        {name: own.take(chosen) for name, own in companions.items()},
        prompts[starts],
        length,
    )


def companion_names(bench: Workbench) -> list[str]:
    """The companions that judge the drafts: that of the settings, and further small models."""
    s = bench.settings
    known = {same_distribution(s.target), same_distribution(s.draft)}
    names = []
    for name in [*([s.companion] if s.companion else []), *s.models]:
        if same_distribution(name) not in known:
            known.add(same_distribution(name))
            names.append(name)
    return names


def record(bench: Workbench, sampling: Sampling) -> Recording:
    """Record drafts of the settings' models, or read them from the folder of recordings.

    With plain sampling at temperature 1, the target itself is one more companion, so that the
    overlap of draft and target is known.
    """
    s, names = bench.settings, companion_names(bench)
    bench.status(f"recording drafts at {sampling.name}")
    models = _models(bench, names)
    labels = list(names)
    if names and sampling.is_plain:
        models = replace(models, judges=(*models.judges, models.target))
        labels.append(TARGET)
    checkpoint = None
    if s.recordings is not None:
        s.recordings.mkdir(parents=True, exist_ok=True)
        checkpoint = s.recordings / f"{sampling.slug}.safetensors"
    num_prompts = sum(len(task.prompts) for task in bench.tasks)
    done = 0

    def on_step(advanced: list[Request]) -> None:
        nonlocal done
        done += sum(each.finish_reason is not None for each in advanced)
        bench.status(f"recording drafts at {sampling.name}: {done} of {num_prompts} prompts")

    collection = collect(
        models,
        bench.prompts,
        SamplingParams(
            max_tokens=s.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=s.seed,
        ),
        num_speculative_tokens=s.num_speculative_tokens,
        batch_size=_AT_ONCE,
        checkpoint=checkpoint,
        prompts_per_checkpoint=_PER_CHECKPOINT,
        on_step=on_step,
    )
    judged = [collection.records, *collection.judged]
    companions = dict(zip(labels, judged, strict=False))
    return whole_drafts(
        collection.records, companions, collection.prompts, s.num_speculative_tokens
    )


def _models(bench: Workbench, companions: list[str]) -> Models:
    """The target, the draft, the first companion, and the others as judges."""
    s = bench.settings
    draft = same_distribution(s.draft)

    def loaded(companion: str | None) -> Models:
        policy = "fixed" if companion is None else "sv"
        config = SpeculationConfig(draft, companion=companion, policy=policy)
        return bench.quick().load_models(config)

    every = [loaded(same_distribution(name)) for name in companions] or [loaded(None)]
    judges = tuple(each.companion for each in every[1:] if each.companion is not None)
    return replace(every[0], judges=judges)
