"""What studies share: models, prompts, the target's texts, recorded drafts, measured costs."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import Models
from draftwise.errors import InvalidParameterError
from draftwise.estimators.fits import estimator_fits
from draftwise.estimators.profile import NO_MODEL, fit_profile
from draftwise.llm import LLM
from draftwise.params import SamplingParams, SpeculationConfig
from draftwise.profiling.acceptance import Collection, collect
from draftwise.profiling.latency import measure_latency
from draftwise.studies.positions import Passage, Positions, Text, positions_of, read_texts
from draftwise.studies.settings import StudySettings
from draftwise.studies.sustained import USING_A_PROFILE, Contender, contender
from draftwise.studies.tasks import Task, load_tasks

_COLLECTED_AT_ONCE = 16
# Long texts, and prompts of a larger task, for every prompt of a task.
_LONG_TEXTS = 4


class Workbench:
    """Makes everything once, when it is first asked for.

    Studies of distributions run in float32. Of an inflated model of the zoo they take the one it
    was made from, which says the same and is faster.

    Attributes:
        settings: of the study.
    """

    def __init__(
        self, settings: StudySettings, on_status: Callable[[str], None] = lambda _: None
    ) -> None:
        """Nothing is loaded yet.

        Args:
            settings: of the study.
            on_status: called with what is done next, where that takes time.
        """
        self.settings = settings
        self.status = on_status
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._quick: dict[str, LLM] = {}
        self._texts: dict[tuple[float, int], list[Text]] = {}
        self._positions: dict[tuple[float, int], Positions] = {}
        self._profiles: dict[str | None, str] = {}
        self._collections: dict[tuple[str, str, str | None, int, str], Collection] = {}

    def close(self) -> None:
        """Remove what was written meanwhile."""
        if self._folder is not None:
            self._folder.cleanup()

    # -- models ------------------------------------------------------------------------------

    @cached_property
    def large(self) -> LLM:
        """The target that is timed, with nothing beside it."""
        s = self.settings
        self.status(f"loading {s.target}")
        return LLM(
            s.target,
            None,
            s.dtype,
            s.device,
            max_batch_size=max(s.batch_sizes),
            max_model_len=s.max_model_len,
            trust_remote_code=s.trust_remote_code,
        )

    def quick(self, target: str | None = None) -> LLM:
        """A target whose distributions are looked at, in float32."""
        s = self.settings
        name = same_distribution(target or s.target)
        if name not in self._quick:
            self.status(f"loading {name}")
            self._quick[name] = LLM(
                name,
                None,
                "float32",
                s.device,
                max_batch_size=_COLLECTED_AT_ONCE,
                # A model that stands in for the target may have a shorter context.
                max_model_len=s.max_model_len if name == same_distribution(s.target) else None,
                trust_remote_code=s.trust_remote_code,
            )
        return self._quick[name]

    def models(
        self, draft: str | None = None, companion: str | None = None, target: str | None = None
    ) -> Models:
        """Models whose distributions are looked at; without names those of the settings."""
        s = self.settings
        config = SpeculationConfig(
            draft or s.draft, companion=companion or s.companion, policy="sv"
        )
        return self.quick(target).load_models(config)

    @cached_property
    def timed_models(self) -> Models:
        """The models that are timed."""
        s = self.settings
        config = SpeculationConfig(s.draft, companion=s.companion, policy="sv")
        return self.timed_llm.load_models(config)

    # -- prompts and texts -------------------------------------------------------------------

    @cached_property
    def tasks(self) -> list[Task]:
        """Prompts by task."""
        s = self.settings
        return load_tasks(self.quick(), s.prompts, s.num_prompts, s.longest_prompt, s.chat, s.seed)

    @cached_property
    def larger_tasks(self) -> list[Task]:
        """The same tasks with more prompts, as far as the files hold more."""
        s = self.settings
        count = _LONG_TEXTS * s.num_prompts
        return load_tasks(self.quick(), s.prompts, count, s.longest_prompt, s.chat, s.seed)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts of all tasks, mixed."""
        mixed = [list(prompt) for task in self.tasks for prompt in task.prompts]
        random.Random(self.settings.seed).shuffle(mixed)
        if len(mixed) < 2:
            raise InvalidParameterError("prompts", "a study needs two prompts or more")
        return mixed

    def prompts_of_length(self, num_tokens: int, count: int) -> list[list[int]]:
        """Prompts of exactly so many tokens, made of the mixed prompts one after another."""
        stream = [token for prompt in self.prompts for token in prompt]
        made = []
        for number in range(count):
            first = number * len(stream) // count
            need = -(-num_tokens // len(stream)) + 1
            made.append((stream[first:] + stream * need)[:num_tokens])
        return made

    @property
    def sampling(self) -> SamplingParams:
        """How texts are drawn."""
        s = self.settings
        return SamplingParams(
            max_tokens=s.max_tokens, temperature=s.temperature, top_p=s.top_p, seed=s.seed
        )

    def texts(self, temperature: float | None = None, max_tokens: int | None = None) -> list[Text]:
        """What the target writes after the prompts; those that end at once are left out."""
        s = self.settings
        heat = s.temperature if temperature is None else temperature
        key = heat, max_tokens or s.max_tokens
        if key not in self._texts:
            self.status("the target writes texts")
            llm, params = self.quick(), replace(self.sampling, temperature=heat, max_tokens=key[1])
            prompts = self.prompts
            if max_tokens is not None:  # long texts, and fewer of them
                prompts = prompts[: _LONG_TEXTS * s.num_prompts]
            seeds = [replace(params, seed=s.seed + i) for i in range(len(prompts))]
            outputs = llm.generate(prompts, seeds)
            pairs = zip(prompts, outputs, strict=True)
            self._texts[key] = [Text(p, o.token_ids) for p, o in pairs if len(o.token_ids) > 1]
        return self._texts[key]

    def passages(
        self, temperature: float | None = None, max_tokens: int | None = None
    ) -> Iterator[Passage]:
        """The texts as all three models see them, with whole distributions."""
        texts = self.texts(temperature, max_tokens)
        heat = self.settings.temperature if temperature is None else temperature
        self.status("models read the texts")
        return read_texts(self.models(), texts, heat, self.settings.top_p)

    def positions(
        self, temperature: float | None = None, max_tokens: int | None = None
    ) -> Positions:
        """The numbers of all positions of the texts."""
        s = self.settings
        heat = s.temperature if temperature is None else temperature
        key = heat, max_tokens or s.max_tokens
        if key not in self._positions:
            passages = self.passages(temperature, max_tokens)
            self._positions[key] = positions_of(passages, s.seed)
        return self._positions[key]

    # -- drafts ------------------------------------------------------------------------------

    def collection(
        self,
        draft: str | None = None,
        companion: str | None = None,
        target: str | None = None,
        *,
        num_speculative_tokens: int | None = None,
        task: Task | None = None,
    ) -> Collection:
        """Drafted tokens with all signals, of plain speculative decoding, and where they are from.

        Without names the models of the settings. A companion with the name of the target stands
        for the target itself: S and A then are those of draft and target.
        """
        s = self.settings
        target = same_distribution(target or s.target)
        draft, companion = draft or s.draft, companion or s.companion
        gamma = num_speculative_tokens or s.num_speculative_tokens
        of_task = "" if task is None else f"{task.name} {len(task.prompts)}"
        key = target, draft, companion, gamma, of_task
        if key not in self._collections:
            judges = "" if companion is None else f", {companion} judges"
            self.status(f"{draft} drafts for {target}{judges}")
            told = companion is not None and same_distribution(companion) == target
            config = SpeculationConfig(draft, companion=draft if told else companion, policy="sv")
            models = self.quick(target).load_models(config)
            if told:
                models = replace(models, companion=models.target)
            self._collections[key] = collect(
                models,
                self.prompts if task is None else task.prompts,
                self.sampling,
                num_speculative_tokens=gamma,
                batch_size=_COLLECTED_AT_ONCE,
            )
        return self._collections[key]

    # -- time --------------------------------------------------------------------------------

    @cached_property
    def latency(self) -> LatencyModel:
        """What passes cost here, at the batch sizes of the settings."""
        self.status("timing passes")
        s = self.settings
        return measure_latency(self.timed_models, max(s.batch_sizes), s.num_speculative_tokens)

    def profile(self, companion: str | None = None) -> str:
        """File with an acceptance profile of the models that are timed."""
        s = self.settings
        name = companion or s.companion
        if name not in self._profiles:
            config = SpeculationConfig(s.draft, companion=name, policy="sv")
            timed = self.timed_llm.load_models(config)
            assert timed.draft is not None
            judge = timed.companion
            collection = self.collection(companion=name)
            # The same models in another type; the profile is for those that are timed.
            provenance = dict(collection.provenance) | {
                "target": timed.target.fingerprint,
                "draft": timed.draft.fingerprint,
                "companion": NO_MODEL if judge is None else judge.fingerprint,
            }
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="draftwise-study-")
            path = Path(self._folder.name) / f"{len(self._profiles)}.safetensors"
            fitted = fit_profile(collection.records, provenance, estimator_fits(judge is not None))
            fitted.save(path)
            self._profiles[name] = str(path)
        return self._profiles[name]

    def contenders(
        self,
        names: Sequence[str],
        *,
        companion: str | None = None,
        with_profile: bool = True,
        num_speculative_tokens: int | None = None,
    ) -> list[Contender]:
        """Policies on the models that are timed, each with an engine of its own.

        Args:
            names: of policies, each with a longest draft of its own if one is given: ``fixed:3``.
            companion: another companion than that of the settings.
            with_profile: policies may begin with what the records show.
            num_speculative_tokens: longest draft; ``None`` for that of the settings.
        """
        result = []
        for text in names:
            name, _, length = text.partition(":")
            speculation = self.speculation(
                int(length) if length else num_speculative_tokens,
                companion=companion or self.settings.companion,
                profile=self.profile(companion)
                if with_profile and name in USING_A_PROFILE
                else None,
            )
            self.status(f"setting up {text}")
            result += contender(self.timed_llm, name, speculation, text)
        return result

    def speculation(
        self, num_speculative_tokens: int | None = None, **changes: Any
    ) -> SpeculationConfig:
        """The models of the settings, with other settings of the speculation."""
        s = self.settings
        length = num_speculative_tokens or s.num_speculative_tokens
        values: dict[str, Any] = {
            "companion": s.companion,
            "num_speculative_tokens": length,
        } | changes
        return SpeculationConfig(s.draft, **values)

    @cached_property
    def timed_llm(self) -> LLM:
        """The target that is timed with draft and companion at hand, to share them."""
        s = self.settings
        policy = "fixed" if s.companion is None else "staged"
        config = SpeculationConfig(s.draft, companion=s.companion, policy=policy)
        return self.large.with_speculation(config)


def same_distribution(name: str) -> str:
    """The quickest model that says the same: of an inflated one of the zoo, its origin."""
    return name.partition("@")[0] if name.startswith("zoo:") else name
