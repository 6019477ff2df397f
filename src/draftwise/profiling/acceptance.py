"""Collect what the target thinks of drafted tokens, by plain speculative decoding.

Every draft is as long as may be and verified whole, token by token, and the companion judges all
of it. So the acceptance probability of every drafted token is learnt, of those after the first
rejection too: it is the probability given that the tokens before it were kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwise.core.types import Draft, Judgement, Outcome, Plan, StepTimes
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.estimators.profile import NO_MODEL
from draftwise.estimators.records import Floats, Records
from draftwise.params import SamplingParams, SpeculationConfig
from draftwise.policies.base import PolicyContext, RequestState, Signal
from draftwise.policies.fixed import FixedLength
from draftwise.profiling.checkpoint import Collected, load_checkpoint, save_checkpoint

_PROMPTS_PER_CHECKPOINT = 32
_FEWEST_TOKENS = 3


@dataclass(frozen=True)
class Collection:
    """What a collection gave.

    Attributes:
        records: drafted tokens, prompt after prompt.
        provenance: what they come from.
        num_prompts: prompts that were served.
        num_resumed: how many of them were in the checkpoint.
        errors: why others were not.
    """

    records: Records
    provenance: Mapping[str, str]
    num_prompts: int
    num_resumed: int
    errors: Sequence[DraftwiseError]


def collect(
    models: Models,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    num_speculative_tokens: int = 8,
    batch_size: int = 16,
    checkpoint: Path | None = None,
    prompts_per_checkpoint: int = _PROMPTS_PER_CHECKPOINT,
    on_step: Callable[[list[Request]], None] | None = None,
) -> Collection:
    """Generate for all prompts and keep the signals and the fate of every drafted token.

    The records do not depend on the order in which requests are served: with a checkpoint, a
    collection that was interrupted goes on where it stopped.

    Args:
        models: loaded; with a draft. Without a companion S and A are recorded as 0.
        prompts: token ids.
        sampling: for all prompts; its seed is the first prompt's (0 for ``None``), each next one
            adds 1.
        num_speculative_tokens: length of the drafts.
        batch_size: prompts that run at once.
        checkpoint: file for what there is so far; written every few prompts and when interrupted.
        prompts_per_checkpoint: how many finished prompts make it worth writing.
        on_step: called after every step with the requests that gained tokens.

    Raises:
        InvalidParameterError: there is no draft or nothing for it to do, or the checkpoint is of
            another collection.
        DraftwiseError: not a single prompt could be served; the first one's error.
    """
    if models.draft is None or num_speculative_tokens < 1:
        raise InvalidParameterError("draft", "missing: a profile is about what a draft proposes")
    if sampling.max_tokens < _FEWEST_TOKENS:
        raise InvalidParameterError(
            "max_tokens",
            f"must be at least {_FEWEST_TOKENS} for something to be drafted: the target says the "
            "first token and the last itself",
        )
    first_seed = sampling.seed or 0
    sampling = replace(sampling, seed=first_seed)
    provenance = provenance_of(models, prompts, sampling, num_speculative_tokens)
    collected = {} if checkpoint is None else load_checkpoint(checkpoint, provenance)
    num_resumed = num_saved = len(collected)
    recorder = _Recorder(
        PolicyContext(num_speculative_tokens, has_companion=models.companion is not None),
        frozenset(sampling.stop_token_ids)
        | (frozenset() if sampling.ignore_eos else models.target.eos_token_ids),
    )
    speculation = SpeculationConfig(
        models.draft.name,
        policy=recorder.name,
        num_speculative_tokens=num_speculative_tokens,
        verification="token",
    )
    engine = Engine(models, speculation, EngineOptions(max_batch_size=batch_size), policy=recorder)
    errors = []
    numbers: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        if number not in collected:
            params = replace(sampling, seed=first_seed + number)
            try:
                numbers[engine.add(None, list(prompt), params).request_id] = number
            except DraftwiseError as error:
                errors.append(error)
    try:
        while engine.num_unfinished:
            advanced = engine.step()
            for request in advanced:
                if request.error is not None:
                    errors.append(request.error)
                elif request.finish_reason is not None:
                    collected[numbers[request.request_id]] = recorder.take(request.request_id)
            if on_step is not None:
                on_step(advanced)
            if len(collected) >= num_saved + prompts_per_checkpoint and checkpoint is not None:
                save_checkpoint(checkpoint, collected, provenance)
                num_saved = len(collected)
    finally:
        if checkpoint is not None and len(collected) > num_saved:
            save_checkpoint(checkpoint, collected, provenance)
    if errors and not collected:
        raise errors[0]
    return Collection(_joined(collected), provenance, len(collected), num_resumed, errors)


def provenance_of(
    models: Models,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    num_speculative_tokens: int,
) -> dict[str, str]:
    """What a profile is made from, as text by name: models by their fingerprints."""
    ids = json.dumps([list(prompt) for prompt in prompts])
    companion, draft = models.companion, models.draft
    settings = {
        "target": models.target.fingerprint,
        "draft": NO_MODEL if draft is None else draft.fingerprint,
        "companion": NO_MODEL if companion is None else companion.fingerprint,
        "prompts": hashlib.sha256(ids.encode()).hexdigest()[:16],
        "num_prompts": len(prompts),
        "num_speculative_tokens": num_speculative_tokens,
        "dtype": str(models.target.model.dtype).removeprefix("torch."),
        **{name: _version(name) for name in ("draftwise", "torch", "transformers")},
    }
    for item in fields(sampling):
        value = getattr(sampling, item.name)
        settings[item.name] = dict(value) if isinstance(value, Mapping) else value
    return {name: str(value) for name, value in settings.items()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


class _Recorder(FixedLength):
    """Drafts and verifies a fixed length, and notes what came of every token."""

    signals = frozenset(
        {Signal.ENTROPY, Signal.TOKEN_PROBABILITY, Signal.OVERLAP, Signal.AGREEMENT}
    )

    def __init__(self, context: PolicyContext, end_tokens: frozenset[int]) -> None:
        """Set up.

        Args:
            context: what every policy gets.
            end_tokens: a text ends with them; what is drafted after them means nothing.
        """
        super().__init__(context)
        self._has_companion = context.has_companion
        self._end_tokens = end_tokens
        self._requests: Sequence[RequestState] = ()
        self._draft: Draft | None = None
        self._judgement: Judgement | None = None
        self._chains: dict[int, list[Records]] = {}

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for everybody, as far as there is room."""
        self._requests = requests
        return super().draft_lengths(requests)

    def wants_judgement(self) -> bool:
        """Always, if there is somebody to ask."""
        return self._has_companion

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """All of it."""
        self._draft, self._judgement = draft, judgement
        return super().select(draft, judgement)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Join the draft with what became of it."""
        draft, judgement = self._draft, self._judgement
        self._draft = self._judgement = None
        if draft is None or draft.signals is None or outcome.acceptance is None:
            return
        tokens = draft.tokens.tolist()
        nothing = torch.zeros_like(draft.signals.entropy)
        columns = {
            "entropy": draft.signals.entropy,
            "token_prob": draft.signals.token_probs,
            "top_prob": draft.signals.beliefs.amax(dim=2),
            "overlap": nothing if judgement is None else judgement.overlap,
            "agreement": nothing if judgement is None else judgement.agreement,
            "acceptance": outcome.acceptance,
        }
        numbers = {name: _floats(column) for name, column in columns.items()}
        for row, request in enumerate(self._requests):
            length = self._meaningful(tokens[row][: draft.lengths[row]])
            if length == 0 or row in outcome.failed:
                continue
            position = np.arange(length)
            self._chains.setdefault(request.request_id, []).append(
                Records(
                    chain=np.zeros(length, dtype=np.int64),
                    position=position,
                    history=np.full(length, request.history, dtype=np.float32),
                    accepted=position < outcome.num_accepted[row],
                    **{name: column[row, :length] for name, column in numbers.items()},
                )
            )

    def _meaningful(self, tokens: list[int]) -> int:
        """How many tokens there are up to the first that ends a text."""
        ends = (at for at, token in enumerate(tokens, start=1) if token in self._end_tokens)
        return next(ends, len(tokens))

    def take(self, request_id: int) -> Records:
        """What was noted of a request that is done."""
        return Records.join(self._chains.pop(request_id, []) or [Records.empty()])


def _floats(column: Tensor) -> Floats:
    values: Floats = column.float().cpu().numpy()
    return values


def _joined(collected: Collected) -> Records:
    return Records.join([collected[number] for number in sorted(collected)] or [Records.empty()])
