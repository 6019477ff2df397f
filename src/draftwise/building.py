"""From names and settings to an engine: models are loaded once, costs measured once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

import torch

from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.overlap import Interference, OverlapOptions
from draftwise.engine.turns import Turns
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.imports import quiet_import
from draftwise.models.loading import (
    LoadedModel,
    check_same_vocabulary,
    load_model,
    loaded_name,
)
from draftwise.params import SpeculationConfig
from draftwise.policies import POLICIES, Policy, policy_class
from draftwise.profiling.latency import check_latency, measure_latency
from draftwise.profiling.latency_profile import LatencyProfile
from draftwise.profiling.passes import Stage

if TYPE_CHECKING:
    from draftwise.engine.replicas.processes import Replicas

# transformers sets defaults of the whole process while it loads a model.
_LOADING = Lock()


@dataclass(frozen=True)
class BuildSettings:
    """What all engines of one target have in common.

    Attributes:
        dtype: of the weights.
        device: where they are.
        trust_remote_code: run code that comes with a model.
        options: sizes of an engine; whether it overlaps is decided for each.
        overlap: draft for one half of the batch while the target verifies the other; ``None``
            where the latency profile says that it pays.
        draft_replicas: processes that draft.
        on_status: is told what is done next, where that takes seconds.
    """

    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool
    options: EngineOptions
    overlap: bool | None
    draft_replicas: int
    on_status: Callable[[str], None]


class EngineBuilder:
    """Builds engines on one loaded target.

    Attributes:
        target: the loaded target model.
        turns: of all these engines, which share what the target computes in.
        tokenizing: held while the target's tokenizer makes tokens of text; calls change its
            settings.
    """

    def __init__(self, target: str, max_model_len: int | None, settings: BuildSettings) -> None:
        """Load the target.

        Args:
            target: a folder, a hub id or a zoo name.
            max_model_len: longest prompt and output together; ``None`` for the target's own.
            settings: of all engines.

        Raises:
            DraftwiseError: it cannot be loaded.
        """
        self.turns = Turns()
        self.tokenizing = Lock()
        self._settings = settings
        self._measured: dict[tuple[str | int, ...], LatencyModel] = {}
        self.target = self._load(target, "target", max_model_len)

    def load_models(self, speculation: SpeculationConfig, at_hand: Models | None = None) -> Models:
        """The target with the draft and companion that a configuration names.

        Args:
            speculation: names them.
            at_hand: models that are loaded already; they are shared.

        Raises:
            DraftwiseError: one cannot be loaded, or speaks of other tokens than the target.
        """
        known = () if at_hand is None else (at_hand.draft, at_hand.companion)
        loaded = {model.name: model for model in known if model is not None}

        def small_model(name: str, role: str, quantization: str | None = None) -> LoadedModel:
            full_name = loaded_name(name, quantization)
            if full_name not in loaded:
                # Its context may be the shorter one; beyond it nothing is drafted.
                model = self._load(name, role, self.target.max_model_len, quantization)
                check_same_vocabulary(self.target, model, role)
                loaded[full_name] = model
            return loaded[full_name]

        draft = companion = None
        if policy_class(speculation.policy_name).needs_draft:
            draft = small_model(speculation.draft, "draft")
        quantization = speculation.companion_quantization
        if quantization is not None:
            companion = small_model(speculation.draft, "companion", quantization)
        elif speculation.companion is not None:
            companion = small_model(speculation.companion, "companion")
        return Models(self.target, draft, companion)

    def build(
        self, speculation: SpeculationConfig | None, at_hand: Models | None = None
    ) -> tuple[Engine, Models]:
        """An engine, and the models that it has.

        Args:
            speculation: how; ``None`` for target-only decoding.
            at_hand: models that are loaded already; they are shared.

        Raises:
            DraftwiseError: a typed error that names the setting at fault.
        """
        if speculation is None:
            models = Models(self.target)
            return Engine(models, None, self._settings.options, turns=self.turns), models
        policy = policy_class(speculation.policy_name)
        if speculation.companion is not None:
            _check_companion_is_asked(policy)
        models = self.load_models(speculation, at_hand)
        profile = None
        if speculation.profile is not None:
            profile = AcceptanceProfile.load(speculation.profile)
            profile.check(
                target=models.target.fingerprint,
                draft=None if models.draft is None else models.draft.fingerprint,
                companion=None if models.companion is None else models.companion.fingerprint,
            )
        costs = None
        if speculation.latency_profile is not None:
            costs = LatencyProfile.load(speculation.latency_profile)
        overlap = self._overlap(policy, costs)
        latency = None
        if policy.needs_latency or (overlap is not None and overlap.interference is not None):
            latency = self._latency(speculation, models, costs)
        replicas = None
        if models.draft is not None and self._settings.draft_replicas > 1:
            replicas = self._start_replicas(speculation, models, models.draft)
        options = replace(self._settings.options, overlap=overlap)
        engine = Engine(
            models,
            speculation,
            options,
            latency,
            profile,
            replicas=replicas,
            turns=self.turns,
        )
        return engine, models

    def _load(
        self, name: str, role: str, context: int | None, quantization: str | None = None
    ) -> LoadedModel:
        settings = self._settings
        settings.on_status(f"loading {name}")
        with _LOADING, quiet_import():
            return load_model(
                name,
                role,
                settings.dtype,
                settings.device,
                context,
                settings.trust_remote_code,
                may_be_shorter=role != "target",
                quantization=quantization,
            )

    def _overlap(self, policy: type[Policy], costs: LatencyProfile | None) -> OverlapOptions | None:
        """When halves of the batch overlap; ``None`` for never."""
        wanted = self._settings.overlap
        if wanted:
            return OverlapOptions()
        can_overlap = self._settings.device.type == "cpu" and not policy.judged_by_target
        if wanted is False or costs is None or not can_overlap:
            return None
        measured = costs.interference
        if not measured.keys() >= {Stage.TARGET, Stage.DRAFT}:
            return None
        return OverlapOptions(Interference(measured[Stage.TARGET], measured[Stage.DRAFT]))

    def _latency(
        self, speculation: SpeculationConfig, models: Models, costs: LatencyProfile | None
    ) -> LatencyModel:
        """What passes cost here: as profiled, or measured for a few seconds."""
        if costs is not None:
            assert speculation.latency_profile is not None
            return check_latency(costs, speculation.latency_profile, models)
        names = tuple(m.name for m in (models.draft, models.companion) if m is not None)
        key: tuple[str | int, ...] = (*names, speculation.num_speculative_tokens)
        if key not in self._measured:
            self._settings.on_status("measuring what passes cost on this machine")
            with self.turns:
                self._measured[key] = measure_latency(
                    models,
                    self._settings.options.max_batch_size,
                    speculation.num_speculative_tokens,
                )
        # Each engine follows the machine by itself from what was measured.
        measured = self._measured[key]
        return LatencyModel(measured.target, measured.draft, measured.companion)

    def _start_replicas(
        self, speculation: SpeculationConfig, models: Models, draft: LoadedModel
    ) -> Replicas:
        """One process for each replica but the first, which is the engine's own."""
        # Not every PyTorch can speak to other processes.
        from draftwise.engine.replicas.process import ModelSpec, ReplicaSpec
        from draftwise.engine.replicas.processes import Replicas

        settings = self._settings

        def spec(name: str, role: str, quantization: str | None = None) -> ModelSpec:
            return ModelSpec(
                name,
                role,
                settings.dtype,
                self.target.max_model_len,
                settings.trust_remote_code,
                quantization,
            )

        companion = None
        if models.companion is not None:
            quantization = speculation.companion_quantization
            name = speculation.draft if quantization else speculation.companion
            assert name is not None
            companion = spec(name, "companion", quantization)
        count, kind = settings.draft_replicas, settings.device.type
        settings.on_status(f"starting {count - 1} replicas of the draft")
        specs = [
            ReplicaSpec(
                spec(speculation.draft, "draft"),
                companion,
                kind if kind == "cpu" else f"{kind}:{rank}",
                settings.options.max_batch_size,
                self.target.model.vocab_size,
                max(1, torch.get_num_threads() // count),
            )
            for rank in range(1, count)
        ]
        small = [model for model in (draft, models.companion) if model is not None]
        return Replicas(specs, [model.fingerprint for model in small])


def _check_companion_is_asked(policy: type[Policy]) -> None:
    """Loading a model that nobody asks is a mistake.

    Raises:
        InvalidParameterError: names the policies that ask a companion.
    """

    def asks(each: type[Policy]) -> bool:
        return each.needs_draft and each.uses_companion() and not each.judged_by_target

    if not asks(policy):
        others = ", ".join(name for name, each in POLICIES.items() if asks(each))
        raise InvalidParameterError(
            "companion",
            f"policy {policy.name!r} never asks one; leave it out or choose one of: {others}",
        )
