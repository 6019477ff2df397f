"""Construction of engines from model names and settings.

Models are loaded once and latencies are measured once for all engines of a target.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import torch

from draftwise.checkpoints.exits.files import find_exit
from draftwise.checkpoints.imports import quiet_import
from draftwise.checkpoints.mtp import refuse_mtp
from draftwise.checkpoints.source import loaded_name, split_name
from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.memory import fitting_context
from draftwise.engine.parallel.overlap import Interference, OverlapOptions, OverlappedEngine
from draftwise.engine.proposers.by_name import draft_model_name
from draftwise.engine.turns import Turns
from draftwise.errors import (
    DraftwiseWarning,
    InvalidParameterError,
    SlowPathWarning,
    UnsupportedModelError,
)
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.exits.loading import check_exits, load_exit
from draftwise.models.heads.loading import (
    check_head_kind,
    find_named_head,
    is_bundled_or_local_head,
    load_head,
)
from draftwise.models.heads.model import HeadModel
from draftwise.models.loading import LoadedModel, WeightTypes, load_model
from draftwise.models.vocabulary_match import match_vocabulary
from draftwise.policies import Policy, policy_class
from draftwise.policies.catalogue import check_companion_is_asked
from draftwise.profiling.latency import check_latency, measure_latency
from draftwise.profiling.latency_profile import LatencyProfile
from draftwise.profiling.passes import Stage
from draftwise.speculation import SpeculationConfig

if TYPE_CHECKING:
    from draftwise.engine.parallel.replicas.processes import Replicas

# transformers changes defaults of the whole process while it loads a model.
_LOADING = Lock()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildSettings:
    """Settings shared by all engines of one target.

    Attributes:
        dtypes: data types of the weights.
        device: device of the weights.
        trust_remote_code: allow models to run code from their repositories.
        options: sizes of an engine.
        overlap: draft for one half of the batch while the target verifies the other half; ``None``
            decides by the latency profile.
        draft_replicas: number of processes that draft.
        fits_context: whether a target's context that does not fit the caches is shortened.
        on_status: called with a description of each operation that takes seconds.
    """

    dtypes: WeightTypes
    device: torch.device
    trust_remote_code: bool
    options: EngineOptions
    overlap: bool | None
    draft_replicas: int
    fits_context: bool
    on_status: Callable[[str], None]


class EngineBuilder:
    """Builds engines on one loaded target.

    Attributes:
        target: the loaded target model.
        turns: lock of all engines of the target, which share its workspace.
        tokenizing: lock of the target's tokenizer, whose calls change its settings.
    """

    def __init__(self, target: str, max_model_len: int | None, settings: BuildSettings) -> None:
        """Load the target.

        Args:
            target: a folder, a hub id or a zoo name.
            max_model_len: maximum number of tokens of a prompt and its output together; ``None``
                for the context length of the target.
            settings: settings of all engines.

        Raises:
            DraftwiseError: the target cannot be loaded.
        """
        self.turns = Turns()
        self.tokenizing = Lock()
        self._settings = settings
        self._measured: dict[tuple[str | int, ...], LatencyModel] = {}
        self.target = self._load(target, "target", max_model_len)
        if max_model_len is None and settings.fits_context:
            self._fit_context()

    def _fit_context(self) -> None:
        """Shorten the target's context if one request of it does not fit the caches' memory."""
        target, limit = self.target, self._settings.options.cache_bytes
        fitting = fitting_context(target.model, target.max_model_len, limit)
        if fitting < target.max_model_len:
            assert limit is not None
            warnings.warn(
                f"max_model_len is {fitting}: the target's context of {target.max_model_len} "
                f"tokens does not fit the {limit / 2**30:.1f} GiB of the key-value caches",
                DraftwiseWarning,
                stacklevel=2,
            )
            self.target = replace(target, max_model_len=fitting)

    def load_models(self, speculation: SpeculationConfig, at_hand: Models | None = None) -> Models:
        """Load the draft and the companion of a configuration.

        Args:
            speculation: configuration with the names of the models.
            at_hand: models that are already loaded, to be shared.

        Returns:
            The models, including the target.

        Raises:
            DraftwiseError: a model cannot be loaded, or has no tokens in common with the target.
        """
        known = () if at_hand is None else (at_hand.draft, at_hand.companion)
        loaded = {model.name: model for model in known if model is not None}

        def small_model(name: str, role: str, quantization: str | None = None) -> LoadedModel:
            full_name = loaded_name(name, quantization)
            if full_name not in loaded:
                # An exit is checked by passes of the target, which other engines may be using.
                with self.turns:
                    found = load_exit(full_name, role, self.target)
                if found is not None:
                    loaded[full_name] = found
            if full_name not in loaded and role == "draft":
                head = self._load_head(name)
                if head is not None:
                    loaded[full_name] = head
            if full_name not in loaded:
                # Its context may be shorter; no tokens are drafted beyond it.
                model = self._load(name, role, self.target.max_model_len, quantization)
                loaded[full_name] = match_vocabulary(self.target, model, role)
            if role != "draft" and isinstance(loaded[full_name].model, HeadModel):
                raise _is_a_head(name, role)
            return loaded[full_name]

        refuse_mtp(self.target.name, speculation.draft_names, speculation.method)
        draft = companion = None
        needs_draft = policy_class(speculation.policy_name).needs_draft
        draft_model = draft_model_name(speculation)
        if needs_draft and draft_model is not None:
            if speculation.method is not None:
                check_head_kind(draft_model, speculation.method)
            draft = small_model(draft_model, "draft")
        quantization = speculation.companion_quantization
        if quantization is not None:
            if draft_model is None:
                raise InvalidParameterError(
                    "companion", f"{speculation.companion!r} needs a draft model"
                )
            companion = small_model(draft_model, "companion", quantization)
        elif speculation.companion is not None:
            companion = small_model(speculation.companion, "companion")
        check_exits(draft, companion)
        return Models(self.target, draft, companion)

    def build(
        self, speculation: SpeculationConfig | None, at_hand: Models | None = None
    ) -> tuple[Engine, Models]:
        """Build an engine.

        Args:
            speculation: speculation settings; ``None`` for target-only decoding.
            at_hand: models that are already loaded, to be shared.

        Returns:
            The engine and its models.

        Raises:
            DraftwiseError: a typed error that names the invalid setting.
        """
        if speculation is None:
            models = Models(self.target)
            return Engine(models, None, self._settings.options, turns=self.turns), models
        policy = policy_class(speculation.policy_name)
        if speculation.companion is not None:
            check_companion_is_asked(policy)
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
        overlap = self._overlap(policy, costs, models)
        latency = None
        needs_latency = policy.needs_latency or (policy.needs_draft and speculation.guard)
        if needs_latency or (overlap is not None and overlap.interference is not None):
            latency = self._latency(speculation, models, costs)
        replicas = None
        if models.draft is not None and self._settings.draft_replicas > 1:
            if overlap is not None:
                raise InvalidParameterError(
                    "overlap", "cannot be combined with draft_replicas; use one of them"
                )
            if len(speculation.draft_names) > 1:
                raise InvalidParameterError(
                    "draft_replicas", "cannot be combined with several drafts; name the model only"
                )
            replicas = self._start_replicas(speculation, models, models.draft)
        options = self._settings.options
        parts = models, speculation, options, latency, profile
        if overlap is not None and models.draft is not None:
            return OverlappedEngine(*parts, turns=self.turns, overlap=overlap), models
        if replicas is None:
            return Engine(*parts, turns=self.turns), models
        # Not every platform has the socket pairs that replicas need.
        from draftwise.engine.parallel.replicas.assembly import ReplicaAssembly

        return Engine(*parts, turns=self.turns, assemble=partial(ReplicaAssembly, replicas)), models

    def _load(
        self, name: str, role: str, context: int | None, quantization: str | None = None
    ) -> LoadedModel:
        settings = self._settings
        plain = split_name(name)[0]
        if is_bundled_or_local_head(plain, role):
            raise _is_a_head(name, role)
        if find_exit(plain) is not None:
            raise UnsupportedModelError(role, f"{name!r} is an exit of a target; use it as a draft")
        settings.on_status(f"loading {name}")
        with _LOADING, quiet_import():
            loaded = load_model(
                name,
                role,
                settings.dtypes,
                settings.device,
                context,
                settings.trust_remote_code,
                may_be_shorter=role != "target",
                quantization=quantization,
            )
        _warn_of_slow_path(loaded, role)
        _log(loaded, role)
        return loaded

    def _load_head(self, name: str) -> LoadedModel | None:
        """Load the draft if it is a head of the target; ``None`` if it is something else."""
        folder = find_named_head(name)
        if folder is None:
            return None
        self._settings.on_status(f"loading {name}")
        with _LOADING, quiet_import():
            head = load_head(name, folder, self.target, self.target.model.dtype)
        _warn_of_slow_path(head, "draft")
        return head

    def _overlap(
        self, policy: type[Policy], costs: LatencyProfile | None, models: Models
    ) -> OverlapOptions | None:
        """Options of overlapped drafting; ``None`` if it is disabled."""
        wanted = self._settings.overlap
        if wanted:
            return OverlapOptions()
        target_is_free = not policy.uses_target_oracle and not models.have_exit
        can_overlap = (
            self._settings.device.type == "cpu"
            and self._settings.draft_replicas == 1
            and target_is_free
        )
        if wanted is False or costs is None or not can_overlap:
            return None
        measured = costs.interference
        if not measured.keys() >= {Stage.TARGET, Stage.DRAFT}:
            return None
        return OverlapOptions(Interference(measured[Stage.TARGET], measured[Stage.DRAFT]))

    def _latency(
        self, speculation: SpeculationConfig, models: Models, costs: LatencyProfile | None
    ) -> LatencyModel:
        """The latency model: from the latency profile, or measured for a few seconds."""
        if costs is not None:
            assert speculation.latency_profile is not None
            with self.turns:
                return check_latency(costs, speculation.latency_profile, models)
        names = tuple(m.name for m in (models.draft, models.companion) if m is not None)
        key: tuple[str | int, ...] = (*names, speculation.num_speculative_tokens)
        if key not in self._measured:
            self._settings.on_status("measuring latencies on this machine")
            with self.turns:
                self._measured[key] = measure_latency(
                    models,
                    self._settings.options.max_batch_size,
                    speculation.num_speculative_tokens,
                )
        # A copy, because each engine corrects its latency model by its own step times.
        measured = self._measured[key]
        return LatencyModel(measured.target, measured.draft, measured.companion)

    def _start_replicas(
        self, speculation: SpeculationConfig, models: Models, draft: LoadedModel
    ) -> Replicas:
        """Start a process for each replica except the first, which is in the engine's process."""
        from draftwise.engine.parallel.replicas.messages import ModelSpec, ReplicaSpec
        from draftwise.engine.parallel.replicas.processes import Replicas

        settings = self._settings
        if isinstance(draft.model, HeadModel) or models.have_exit:
            raise InvalidParameterError(
                "draft_replicas", "needs a draft model, as heads and exits use the target's states"
            )
        if any(m is not None and m.translator is not None for m in (draft, models.companion)):
            raise InvalidParameterError(
                "draft_replicas", "needs a draft and a companion with the target's vocabulary"
            )

        draft_name = draft_model_name(speculation)
        assert draft_name is not None

        def spec(
            name: str, loaded: LoadedModel, role: str, quantization: str | None = None
        ) -> ModelSpec:
            return ModelSpec(
                name,
                role,
                loaded.model.dtype,
                self.target.max_model_len,
                settings.trust_remote_code,
                quantization,
            )

        companion = None
        if models.companion is not None:
            quantization = speculation.companion_quantization
            name = draft_name if quantization else speculation.companion
            assert name is not None
            companion = spec(name, models.companion, "companion", quantization)
        count, kind = settings.draft_replicas, settings.device.type
        settings.on_status(f"starting {count - 1} replicas of the draft")
        specs = [
            ReplicaSpec(
                spec(draft_name, draft, "draft"),
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


def _log(loaded: LoadedModel, role: str) -> None:
    """Log what a loaded model is, for ``--verbose``."""
    tokens = sorted(loaded.eos_token_ids)
    texts = (
        map(str, tokens)
        if loaded.tokenizer is None
        else (f"{loaded.tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)
    )
    _LOG.info(
        "%s: %r has %d tokens of context and %s; its texts end at %s",
        role,
        loaded.name,
        loaded.max_model_len,
        str(loaded.model.dtype).removeprefix("torch."),
        ", ".join(texts) or "no token",
    )


def _warn_of_slow_path(loaded: LoadedModel, role: str) -> None:
    """Warn of a model that is computed more slowly than others of its size."""
    slow_path = loaded.model.slow_path
    if slow_path is not None:
        warnings.warn(
            f"{role}: {loaded.name!r} does not run on the fast path: {slow_path}",
            SlowPathWarning,
            stacklevel=3,
        )


def _is_a_head(name: str, role: str) -> UnsupportedModelError:
    """The error for a head in another role than that of the draft."""
    return UnsupportedModelError(
        role, f"{name!r} is a head that reads another model's states; use it as the draft"
    )
