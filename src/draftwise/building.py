"""What loads the models of engines and measures their latencies, once for all engines of a target.

The engine itself is put together in :mod:`draftwise.engine.assembly`.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from threading import Lock
from weakref import WeakValueDictionary

import torch

from draftwise.checkpoints.exits.files import find_exit
from draftwise.checkpoints.imports import quiet_import
from draftwise.checkpoints.mtp import check_mtp, drafts_with_mtp, names_mtp
from draftwise.checkpoints.mtp_folder import find_mtp
from draftwise.checkpoints.source import loaded_name, split_name
from draftwise.core.latency import LatencyModel
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.memory import fitting_context
from draftwise.engine.parallel.build import ParallelOptions, build_engine
from draftwise.engine.proposers.by_name import draft_model_name
from draftwise.engine.rehearsal import rehearse
from draftwise.engine.turns import Turns
from draftwise.errors import (
    DraftwiseWarning,
    InvalidParameterError,
    SlowPathWarning,
    UnsupportedModelError,
)
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.exits.loading import check_exits, load_exit
from draftwise.models.heads.draft_head import DraftHead
from draftwise.models.heads.loading import (
    check_head_kind,
    find_named_head,
    is_bundled_or_local_head,
    load_head,
)
from draftwise.models.heads.mtp import load_mtp
from draftwise.models.loading import LoadedModel, load_model, weight_types
from draftwise.models.static_steps import StepMode
from draftwise.models.vocabulary_match import match_vocabulary
from draftwise.policies import policy_class
from draftwise.policies.catalogue import check_companion_is_asked
from draftwise.profiling.latency import load_latency, measure_latency
from draftwise.speculation import SpeculationConfig
from draftwise.values import boolean, integer, path_name, shown

# transformers changes defaults of the whole process while it loads a model.
_LOADING = Lock()
_LOG = logging.getLogger(__name__)


class EngineBuilder:
    """Builds engines on one target.

    Attributes:
        turns: lock of all engines of the target, which share its workspace.
        tokenizing: lock of the target's tokenizer, whose calls change its settings.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        dtype: str | torch.dtype,
        device: torch.device,
        max_model_len: int | None,
        trust_remote_code: bool,
        on_status: Callable[[str], None] | None,
        options: EngineOptions,
        parallel: ParallelOptions,
        fits_context: bool,
    ) -> None:
        """Check the settings of all engines; see :class:`draftwise.LLM`. Nothing is loaded yet.

        Args:
            target: a folder, a hub id or a zoo name.
            dtype: data type of the weights.
            device: device of the weights.
            max_model_len: maximum number of tokens of a prompt and its output together; ``None``
                for the context length of the target.
            trust_remote_code: allow models to run code from their repositories.
            on_status: called with a description of each operation that takes seconds.
            options: sizes of an engine.
            parallel: what an engine computes at the same time.
            fits_context: whether a target's context that does not fit the caches is shortened.

        Raises:
            InvalidParameterError: a setting is invalid.
        """
        self.turns = Turns()
        self.tokenizing = Lock()
        self._target_name = path_name("target", target, "model")
        self._dtypes, self._device = weight_types(dtype, device), device
        if max_model_len is not None:
            max_model_len = integer("max_model_len", max_model_len, 1)
        self._max_model_len = max_model_len
        self._fits_context = fits_context and max_model_len is None
        self._trust_remote_code = boolean("trust_remote_code", trust_remote_code)
        if on_status is not None and not callable(on_status):
            raise InvalidParameterError("on_status", f"must be callable, got {shown(on_status)}")
        self._on_status = on_status or _ignore_status
        self._options, self._parallel = options, parallel
        # Models that some engine still uses, and measured latencies.
        self._loaded: WeakValueDictionary[str, LoadedModel] = WeakValueDictionary()
        self._measured: dict[tuple[str | int, ...], LatencyModel] = {}

    @cached_property
    def target(self) -> LoadedModel:
        """The target. It is loaded at the first use.

        Raises:
            DraftwiseError: it cannot be loaded.
        """
        target = self._load(self._target_name, "target", self._max_model_len)
        limit = self._options.cache_bytes if self._fits_context else None
        fitting = fitting_context(target.model, target.max_model_len, limit)
        if limit is None or fitting >= target.max_model_len:
            return target
        warnings.warn(
            f"max_model_len is {fitting}: the target's context of {target.max_model_len} tokens "
            f"does not fit the {limit / 2**30:.1f} GiB of the key-value caches",
            DraftwiseWarning,
            stacklevel=2,
        )
        return replace(target, max_model_len=fitting)

    def build(self, speculation: SpeculationConfig | None) -> tuple[Engine, Models]:
        """Build an engine.

        Args:
            speculation: speculation settings; ``None`` for target-only decoding.

        Returns:
            The engine and its models.

        Raises:
            DraftwiseError: a typed error that names the invalid setting.
        """
        profile = latency = None
        if speculation is None:
            models = Models(self.target)
        else:
            policy = policy_class(speculation.policy_name)
            if speculation.companion is not None:
                check_companion_is_asked(policy)
            models = self.load_models(speculation)
            if speculation.profile is not None:
                profile = AcceptanceProfile.load(speculation.profile)
                profile.check(
                    target=models.target.fingerprint,
                    draft=None if models.draft is None else models.draft.fingerprint,
                    companion=None if models.companion is None else models.companion.fingerprint,
                )
            is_useful = speculation.guard or speculation.latency_profile is not None
            if policy.needs_latency or (policy.needs_draft and is_useful):
                latency = self._latency(speculation, models)
        engine = build_engine(
            self._parallel,
            models,
            speculation,
            self._options,
            latency,
            profile,
            self.turns,
            self._on_status,
        )
        if speculation is not None and models.target.model.step_mode is StepMode.GRAPHS:
            rehearse(engine, self._options.max_batch_size, self._on_status)
        return engine, models

    def load_models(self, speculation: SpeculationConfig) -> Models:
        """Load the draft and the companion of a configuration.

        Models that an engine of this target uses are shared.

        Returns:
            The models, including the target.

        Raises:
            DraftwiseError: a model cannot be loaded, or has no tokens in common with the target.
        """
        # Before the target is loaded, which may take long.
        check_mtp(self._target_name, speculation.draft_names, speculation.method)
        draft = companion = None
        needs_draft = policy_class(speculation.policy_name).needs_draft
        draft_name, name = draft_model_name(speculation), speculation.companion
        if needs_draft and draft_name is not None:
            if speculation.method is not None and not drafts_with_mtp(draft_name):
                check_head_kind(draft_name, speculation.method)
            draft = self._small_model(draft_name, "draft")
        if speculation.companion_quantization is not None:
            if draft_name is None:
                raise InvalidParameterError("companion", f"{name!r} needs a draft model")
            name = loaded_name(draft_name, speculation.companion_quantization)
        if name is not None:
            companion = self._small_model(name, "companion")
        check_exits(draft, companion)
        return Models(self.target, draft, companion)

    def _small_model(self, name: str, role: str) -> LoadedModel:
        """Load a draft or a companion, unless an engine uses it already."""
        found = self._loaded.get(name)
        if found is None:
            target = self.target
            # An exit is checked by passes of the target, which other engines may be using.
            with self.turns:
                found = load_exit(name, role, target)
            if found is None and role == "draft":
                found = self._load_mtp(name) or self._load_head(name)
            if found is None:
                # Its context may be shorter; no tokens are drafted beyond it.
                model = self._load(name, role, target.max_model_len)
                found = match_vocabulary(target, model, role)
            self._loaded[name] = found
        if role != "draft" and isinstance(found.model, DraftHead):
            raise _is_a_head(name, role)
        return found

    def _load(self, name: str, role: str, context: int | None) -> LoadedModel:
        plain = split_name(name)[0]
        if is_bundled_or_local_head(plain, role):
            raise _is_a_head(plain, role)
        for found, what in ((find_exit(plain), "an exit"), (find_mtp(plain), "an MTP layer")):
            if found is not None:
                raise UnsupportedModelError(
                    role, f"{name!r} is {what} of a target; use it as a draft"
                )
        self._on_status(f"loading {name}")
        with _LOADING, quiet_import():
            loaded = load_model(
                name,
                role,
                self._dtypes,
                self._device,
                context,
                self._trust_remote_code,
                may_be_shorter=role != "target",
            )
        _warn_of_slow_path(loaded, role)
        _log(loaded, role)
        return loaded

    def _load_mtp(self, name: str) -> LoadedModel | None:
        """Load the draft if it is an MTP layer of the target; ``None`` if it is something else."""
        folder = find_mtp(name)
        if folder is None and not names_mtp(name):
            return None
        target = self.target
        self._on_status("loading the MTP layer")
        with _LOADING, quiet_import():
            return load_mtp(target, self._target_name if folder is None else name, folder)

    def _load_head(self, name: str) -> LoadedModel | None:
        """Load the draft if it is a head of the target; ``None`` if it is something else."""
        folder = find_named_head(name)
        if folder is None:
            return None
        self._on_status(f"loading {name}")
        with _LOADING, quiet_import():
            head = load_head(name, folder, self.target, self.target.model.dtype)
        _warn_of_slow_path(head, "draft")
        return head

    def _latency(self, speculation: SpeculationConfig, models: Models) -> LatencyModel:
        """The latency model: from the latency profile, or measured for a few seconds."""
        if speculation.latency_profile is not None:
            with self.turns:
                return load_latency(speculation.latency_profile, models)
        names = tuple(m.name for m in (models.draft, models.companion) if m is not None)
        key: tuple[str | int, ...] = (*names, speculation.num_speculative_tokens)
        if key not in self._measured:
            self._on_status("measuring latencies on this machine")
            with self.turns:
                self._measured[key] = measure_latency(
                    models, self._options.max_batch_size, speculation.num_speculative_tokens
                )
        # A copy, because each engine corrects its latency model by its own step times.
        measured = self._measured[key]
        return LatencyModel(measured.target, measured.draft, measured.companion)


def _ignore_status(status: str) -> None:
    """Default of ``on_status``."""


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
