"""Collect acceptance records by plain speculative decoding.

Every draft has the maximum length, is scored by the companion, and is verified whole, token by
token. The acceptance probability of every drafted token is therefore known, including tokens after
the first rejection. It is the probability given that the tokens before it are accepted.
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

from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.companion import Companion, SeveralCompanions
from draftwise.engine.engine import Engine
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.estimators.profile import NO_MODEL
from draftwise.estimators.records import Floats, Integers, Records
from draftwise.params import SamplingParams
from draftwise.policies.base import DraftPlan, PolicyContext, Signal
from draftwise.policies.fixed import FixedLength
from draftwise.policies.inputs import RequestState
from draftwise.profiling.checkpoint import Collected, load_checkpoint, save_checkpoint
from draftwise.speculation import SpeculationConfig

_PROMPTS_PER_CHECKPOINT = 32
_MIN_TOKENS = 3


@dataclass(frozen=True)
class Collection:
    """The result of a collection.

    Attributes:
        records: drafted tokens, prompt after prompt.
        prompts: ``[num_tokens]`` index of the prompt of each token.
        judged: the same tokens with S and A of each of ``models.judges``.
        provenance: origin of the records.
        num_prompts: number of prompts that were served.
        num_resumed: number of these prompts that came from the checkpoint.
        errors: errors of the prompts that failed.
    """

    records: Records
    prompts: Integers
    judged: Sequence[Records]
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
    """Generate for all prompts and record the signals and the acceptance of every drafted token.

    The records do not depend on the order in which requests are served. An interrupted collection
    therefore continues from its checkpoint with the same result.

    Args:
        models: loaded models, including a draft. Without a companion, S and A are recorded as 0.
            Judges need a companion beside them.
        prompts: token ids.
        sampling: sampling parameters of all prompts. The seed is that of the first prompt (0 for
            ``None``), and each further prompt adds 1.
        num_speculative_tokens: length of the drafts.
        batch_size: maximum number of prompts that run at once.
        checkpoint: file for partial results. It is written every ``prompts_per_checkpoint``
            finished prompts and on interruption.
        prompts_per_checkpoint: number of finished prompts between two writes.
        on_step: called after every step with the requests that gained tokens.

    Raises:
        InvalidParameterError: there is no draft, no token can be drafted, or the checkpoint belongs
            to another collection.
        DraftwiseError: no prompt could be served. This is the error of the first prompt.
    """
    if models.draft is None or num_speculative_tokens < 1:
        raise InvalidParameterError(
            "draft", "must be a model: a profile records the tokens that a draft model proposes"
        )
    if sampling.max_tokens < _MIN_TOKENS:
        raise InvalidParameterError(
            "max_tokens",
            f"must be at least {_MIN_TOKENS}: the target generates the first and the last token "
            "itself, so fewer leave nothing to draft",
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
    recorder.judges = engine.pipeline.companion
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
    by_companion, numbers_of_prompts = _joined(collected, 1 + len(models.judges))
    return Collection(
        by_companion[0],
        numbers_of_prompts,
        by_companion[1:],
        provenance,
        len(collected),
        num_resumed,
        errors,
    )


def provenance_of(
    models: Models,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    num_speculative_tokens: int,
) -> dict[str, str]:
    """The models and settings that a profile is made from, as text by name.

    Models are identified by their fingerprints.
    """
    ids = json.dumps([list(prompt) for prompt in prompts])
    companion, draft = models.companion, models.draft
    settings = {
        "target": models.target.fingerprint,
        "draft": NO_MODEL if draft is None else draft.fingerprint,
        "companion": NO_MODEL if companion is None else companion.fingerprint,
        "judges": " ".join(judge.fingerprint for judge in models.judges) or NO_MODEL,
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
    """Drafts and verifies a fixed length, and records the acceptance of every token.

    Attributes:
        judges: what scores the drafts. If it is several companions, the scores of each of them are
            recorded.
    """

    signals = frozenset(
        {Signal.ENTROPY, Signal.TOKEN_PROBABILITY, Signal.OVERLAP, Signal.AGREEMENT}
    )

    judges: Companion | None = None

    def __init__(self, context: PolicyContext, end_tokens: frozenset[int]) -> None:
        """Create the policy.

        Args:
            context: context of the policy.
            end_tokens: tokens that end a text. Tokens drafted after one of them are ignored.
        """
        super().__init__(context)
        self._has_companion = context.has_companion
        self._end_tokens = end_tokens
        self._requests: Sequence[RequestState] = ()
        self._draft: Draft | None = None
        self._companion_scores: CompanionScores | None = None
        self._chains: dict[int, list[list[Records]]] = {}

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request, scored if there is a companion."""
        self._requests = requests
        return super().plan_drafts(requests)._replace(scored=self._has_companion)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Verify the whole draft."""
        self._draft, self._companion_scores = draft, companion_scores
        return super().select(draft, companion_scores)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Record the draft's signals with the outcome of its verification."""
        draft, companion_scores = self._draft, self._companion_scores
        self._draft = self._companion_scores = None
        if draft is None or draft.signals is None or outcome.acceptance is None:
            return
        tokens = draft.tokens.tolist()
        signals, nothing = draft.signals, torch.zeros_like(draft.signals.entropy)
        columns = {
            "entropy": signals.entropy,
            "token_prob": signals.token_probs,
            "top_prob": signals.draft_probs.amax(dim=2),
            "confidence": nothing if signals.confidence is None else signals.confidence,
            "acceptance": outcome.acceptance,
        }
        numbers = {name: _floats(column) for name, column in columns.items()}
        every_score = [companion_scores]
        if isinstance(self.judges, SeveralCompanions):
            every_score = list(self.judges.scores)
        scored = [
            {
                "overlap": _floats(nothing if scores is None else scores.overlap),
                "agreement": _floats(nothing if scores is None else scores.agreement),
            }
            for scores in every_score
        ]
        for row, request in enumerate(self._requests):
            length = self._length_until_end(tokens[row][: draft.lengths[row]])
            if length == 0 or row in outcome.failed:
                continue
            position = np.arange(length)
            chains = self._chains.setdefault(request.request_id, [[] for _ in scored])
            for chain, own in zip(chains, scored, strict=True):
                chain.append(
                    Records(
                        chain=np.zeros(length, dtype=np.int64),
                        position=position,
                        history=np.full(length, request.history, dtype=np.float32),
                        accepted=position < outcome.num_accepted[row],
                        **{n: column[row, :length] for n, column in (numbers | own).items()},
                    )
                )

    def _length_until_end(self, tokens: list[int]) -> int:
        """Number of tokens up to and including the first end token."""
        ends = (at for at, token in enumerate(tokens, start=1) if token in self._end_tokens)
        return next(ends, len(tokens))

    def take(self, request_id: int) -> Records:
        """Remove and return the records of a finished request, companion after companion."""
        chains = self._chains.pop(request_id, [])
        return Records.join([part for each in chains for part in each] or [Records.empty()])


def _floats(column: Tensor) -> Floats:
    values: Floats = column.float().cpu().numpy()
    return values


def _joined(collected: Collected, num_companions: int) -> tuple[list[Records], Integers]:
    """The records of all prompts with each companion, and the prompt of each token.

    Args:
        collected: by prompt, the records with the first companion, with the second, and so on.
        num_companions: number of companions; 1 also without one.
    """
    prompts = sorted(collected)
    lengths = [len(collected[prompt]) // num_companions for prompt in prompts]
    joined = []
    for number in range(num_companions):
        parts = [
            collected[prompt].take(np.arange(number * length, (number + 1) * length))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        joined.append(Records.join([_from_zero(part) for part in parts] or [Records.empty()]))
    return joined, np.repeat(np.array(prompts, dtype=np.int64), lengths)


def _from_zero(records: Records) -> Records:
    """The same records with chains that are numbered from 0."""
    return replace(records, chain=records.chain - records.chain[:1].sum())
