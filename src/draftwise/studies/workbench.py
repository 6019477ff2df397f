"""Shared inputs of studies: models, prompts, generated texts, recorded drafts, pass times."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftwise.benchmark.contenders import Setting
from draftwise.benchmark.sustained import USING_A_PROFILE, BatchContender, batch_contenders
from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import Models
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import NO_MODEL, fit_profile
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.profiling.acceptance import Collection, collect
from draftwise.profiling.latency import measure_latency
from draftwise.speculation import SpeculationConfig
from draftwise.studies.positions import Passage, Positions, Text, positions_of, read_texts
from draftwise.studies.settings import StudySettings
from draftwise.studies.tasks import Task, load_tasks

_COLLECTED_AT_ONCE = 16
# Number of long texts, and of prompts of a larger task, per prompt of a task.
_LONG_TEXTS = 4


class Workbench:
    """Loads models and computes inputs lazily, each once.

    Studies of distributions run in ``settings.record_dtype``. Instead of an inflated model of the
    zoo they use the model it was made from, which has the same distributions and is faster.

    Attributes:
        settings: settings of the study.
        status: callback for progress messages.
    """

    def __init__(
        self, settings: StudySettings, on_status: Callable[[str], None] = lambda _: None
    ) -> None:
        """Create a workbench without loading models.

        Args:
            settings: settings of the study.
            on_status: called with a message before each long operation.
        """
        self.settings = settings
        self.status = on_status
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._quick: dict[str, LLM] = {}
        self._texts: dict[int | None, list[Text]] = {}
        self._positions: dict[int | None, Positions] = {}
        self._profiles: dict[str | None, str] = {}
        self._collections: dict[tuple[str, str, str | None, int, str], Collection] = {}

    def beside(self, draft: str, companion: str | None, models: tuple[str, ...] = ()) -> Workbench:
        """A workbench with other small models, which shares the target and the prompts."""
        changed = replace(self.settings, draft=draft, companion=companion, models=models)
        other = Workbench(changed, self.status)
        other.large, other.tasks = self.large, self.tasks
        other._quick, other._collections = self._quick, self._collections
        return other

    def close(self) -> None:
        """Remove temporary files."""
        if self._folder is not None:
            self._folder.cleanup()

    # -- models ------------------------------------------------------------------------------

    @cached_property
    def large(self) -> LLM:
        """The timed target without speculation."""
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
            enable_prefix_caching=False,  # prompts are repeated, and each time computed
        )

    def quick(self, target: str | None = None) -> LLM:
        """A target for studies of distributions."""
        s = self.settings
        name = same_distribution(target or s.target)
        if name not in self._quick:
            self.status(f"loading {name}")
            self._quick[name] = LLM(
                name,
                None,
                s.record_dtype,
                s.device,
                max_batch_size=_COLLECTED_AT_ONCE,
                # A substitute for the target may have a shorter context.
                max_model_len=s.max_model_len if name == same_distribution(s.target) else None,
                trust_remote_code=s.trust_remote_code,
            )
        return self._quick[name]

    def models(
        self, draft: str | None = None, companion: str | None = None, target: str | None = None
    ) -> Models:
        """Models for studies of distributions; by default those of the settings."""
        s = self.settings
        config = SpeculationConfig(
            draft or s.draft, companion=companion or s.companion, policy="sv"
        )
        return self.quick(target).load_models(config)

    @cached_property
    def timed_models(self) -> Models:
        """The timed models."""
        s = self.settings
        config = SpeculationConfig(s.draft, companion=s.companion, policy="sv")
        return self.timed_llm.load_models(config)

    # -- prompts and texts -------------------------------------------------------------------

    @cached_property
    def tasks(self) -> list[Task]:
        """Prompts grouped by task."""
        s = self.settings
        return load_tasks(self.quick(), s.prompts, s.num_prompts, s.longest_prompt, s.chat, s.seed)

    @cached_property
    def larger_tasks(self) -> list[Task]:
        """The same tasks with more prompts, as far as the files contain more."""
        s = self.settings
        count = _LONG_TEXTS * s.num_prompts
        return load_tasks(self.quick(), s.prompts, count, s.longest_prompt, s.chat, s.seed)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts of all tasks, shuffled."""
        mixed = [list(prompt) for task in self.tasks for prompt in task.prompts]
        random.Random(self.settings.seed).shuffle(mixed)
        if len(mixed) < 2:
            raise InvalidParameterError("prompts", "a study requires at least two prompts")
        return mixed

    def prompts_of_length(self, num_tokens: int, count: int) -> list[list[int]]:
        """``count`` prompts of exactly ``num_tokens`` tokens, cut from the concatenated prompts."""
        stream = [token for prompt in self.prompts for token in prompt]
        made = []
        for number in range(count):
            first = number * len(stream) // count
            need = -(-num_tokens // len(stream)) + 1
            made.append((stream[first:] + stream * need)[:num_tokens])
        return made

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the texts."""
        s = self.settings
        return SamplingParams(
            max_tokens=s.max_tokens, temperature=s.temperature, top_p=s.top_p, seed=s.seed
        )

    def texts(self, max_tokens: int | None = None) -> list[Text]:
        """Texts that the target generates, without those of a single token.

        Args:
            max_tokens: maximum number of tokens of fewer, long texts; ``None`` for a text of usual
                length for each prompt.
        """
        s = self.settings
        if max_tokens not in self._texts:
            self.status("generating texts with the target")
            llm, params, prompts = self.quick(), self.sampling, self.prompts
            if max_tokens is not None:  # long texts, and fewer of them
                prompts = prompts[: _LONG_TEXTS * s.num_prompts]
                params = replace(params, max_tokens=max_tokens)
            seeds = [replace(params, seed=s.seed + i) for i in range(len(prompts))]
            outputs = llm.generate(prompts, seeds)
            pairs = zip(prompts, outputs, strict=True)
            self._texts[max_tokens] = [
                Text(p, o.token_ids) for p, o in pairs if len(o.token_ids) > 1
            ]
        return self._texts[max_tokens]

    def passages(self, max_tokens: int | None = None) -> Iterator[Passage]:
        """The texts with the distributions of all three models at each position."""
        texts = self.texts(max_tokens)
        self.status("scoring the texts with all models")
        return read_texts(self.models(), texts, self.settings.temperature, self.settings.top_p)

    def positions(self, max_tokens: int | None = None) -> Positions:
        """Signals and acceptance at all positions of the texts."""
        if max_tokens not in self._positions:
            passages = self.passages(max_tokens)
            self._positions[max_tokens] = positions_of(passages, self.settings.seed)
        return self._positions[max_tokens]

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
        """Records of drafted tokens from plain speculative decoding, with their provenance.

        By default the models are those of the settings. If the companion is the target itself, S
        and A compare draft and target.
        """
        s = self.settings
        target = same_distribution(target or s.target)
        draft, companion = same_distribution(draft or s.draft), companion or s.companion
        if companion is not None:
            companion = same_distribution(companion)
        gamma = num_speculative_tokens or s.num_speculative_tokens
        of_task = "" if task is None else f"{task.name} {len(task.prompts)}"
        key = target, draft, companion, gamma, of_task
        if key not in self._collections:
            scored = "" if companion is None else f", companion {companion}"
            self.status(f"recording drafts: target {target}, draft {draft}{scored}")
            is_target = companion == target
            config = SpeculationConfig(draft, policy="fixed")
            if not is_target:
                config = SpeculationConfig(draft, companion=companion, policy="sv")
            models = self.quick(target).load_models(config)
            if is_target:
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
        """Latency model of the timed models, up to the largest batch size of the settings."""
        self.status("timing passes")
        s = self.settings
        return measure_latency(self.timed_models, max(s.batch_sizes), s.num_speculative_tokens)

    def profile(self, companion: str | None = None) -> str:
        """Path of an acceptance profile of the timed models."""
        s = self.settings
        name = companion or s.companion
        if name not in self._profiles:
            config = SpeculationConfig(s.draft, companion=name, policy="sv")
            timed = self.timed_llm.load_models(config)
            assert timed.draft is not None
            scorer = timed.companion
            collection = self.collection(companion=name)
            # The records come from the same models in float32; the profile is for the timed ones.
            provenance = dict(collection.provenance) | {
                "target": timed.target.fingerprint,
                "draft": timed.draft.fingerprint,
                "companion": NO_MODEL if scorer is None else scorer.fingerprint,
            }
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="draftwise-study-")
            path = Path(self._folder.name) / f"{len(self._profiles)}.safetensors"
            fitted = fit_profile(collection.records, provenance)
            fitted.save(path)
            self._profiles[name] = str(path)
        return self._profiles[name]

    def contenders(
        self,
        names: Sequence[str],
        *,
        companion: str | None = None,
        with_profile: bool = True,
    ) -> list[BatchContender]:
        """Policies on the timed models, each with its own engine.

        Args:
            names: names of policies, with an optional maximum draft length, or nodes and width of
                a token tree: ``fixed:3``, ``eagle2:16x4``.
            companion: companion; ``None`` for that of the settings.
            with_profile: give policies an acceptance profile.
        """
        result = []
        for text in names:
            needs_profile = with_profile and Setting.parse(text).policy in USING_A_PROFILE
            speculation = self.speculation(
                companion=companion or self.settings.companion,
                profile=self.profile(companion) if needs_profile else None,
            )
            self.status(f"setting up {text}")
            result += batch_contenders(self.timed_llm, text, speculation)
        return result

    def speculation(
        self, num_speculative_tokens: int | None = None, **changes: Any
    ) -> SpeculationConfig:
        """A speculation configuration with the models of the settings and the given changes."""
        s = self.settings
        length = s.num_speculative_tokens
        if num_speculative_tokens is not None:
            length = num_speculative_tokens
        values = {"companion": s.companion, "num_speculative_tokens": length} | changes
        return SpeculationConfig(s.draft, **values)

    @cached_property
    def timed_llm(self) -> LLM:
        """The timed target with draft and companion loaded, for other engines to share."""
        s = self.settings
        policy = "fixed" if s.companion is None else "staged"
        config = SpeculationConfig(s.draft, companion=s.companion, policy=policy)
        return self.large.with_speculation(config)


def same_distribution(name: str) -> str:
    """The fastest model with the same distributions: for an inflated zoo model, its origin."""
    return name.partition("@")[0] if name.startswith("zoo:") else name
