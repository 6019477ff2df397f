"""Contenders of a benchmark: Draftwise's policies, and the interface for other engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from draftwise.benchmark.recorder import Recorder, StepRecords
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.policies import policy_class
from draftwise.speculation import SpeculationConfig

BASELINE = "none"


@dataclass(frozen=True)
class Turn:
    """One timed call that answers a batch of prompts.

    Attributes:
        seconds: wall time of the whole call, including prefill.
        answers: generated tokens, one list per prompt.
        finished: seconds from the start until each answer was complete, one per prompt; empty if
            the engine does not report them.
        gains: tokens gained in each step, one list per prompt; empty if the engine does not report
            them.
        records: counts and times of the steps; ``None`` if the engine does not report them.
        counts: speculation counters of another engine, by its own names.
    """

    seconds: float
    answers: list[list[int]]
    finished: list[float] = field(default_factory=list)
    gains: list[list[int]] = field(default_factory=list)
    records: StepRecords | None = None
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(map(len, self.answers))


class Contender(Protocol):
    """Interface of an engine that answers batches of prompts.

    Attributes:
        name: name in the report.
        learns: whether it adapts to observations while it runs.
    """

    name: str
    learns: bool

    def refusal(self, batch_size: int, params: SamplingParams) -> str | None:
        """Reason why it does not support this batch size or these sampling parameters."""

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once.

        Raises:
            PeerError: another engine failed, and is excluded from further turns.
        """

    def describe(self) -> dict[str, Any]:
        """Versions and settings, as JSON-compatible values."""

    def close(self) -> None:
        """Release its resources."""


class PolicyContender:
    """A policy of Draftwise, with its own engine on shared weights.

    Attributes:
        name: name of the policy, with the draft length if one was given.
        llm: LLM with the engine.
        learns: whether the policy adapts to observations while it runs.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        """Create a contender.

        Args:
            name: name in the report.
            llm: LLM with the engine.
        """
        self.name = name
        self.llm = llm
        self._policy = BASELINE if llm.speculation is None else llm.speculation.policy_name
        self.learns = policy_class(self._policy).needs_latency

    def refusal(self, batch_size: int, params: SamplingParams) -> None:
        """Supports everything."""

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once, and record every step."""
        recorder = Recorder()
        engine = self.llm.engine
        ended: dict[Request, float] = {}

        def on_step(requests: list[Request]) -> None:
            recorder.take(requests, engine.times)
            now = time.perf_counter() - start
            ended.update((r, now) for r in requests if r.finish_reason is not None)

        # Excludes the time of oracle queries, which a real policy would not make.
        uncounted_before = engine.uncounted_seconds
        start = time.perf_counter()
        outputs = self.llm.generate(list(prompts), list(params), on_step)
        seconds = time.perf_counter() - start - (engine.uncounted_seconds - uncounted_before)
        order = sorted(recorder.gains, key=lambda request: request.request_id)
        return Turn(
            seconds,
            [output.token_ids for output in outputs],
            [ended[request] for request in order],
            [recorder.gains[request] for request in order],
            recorder.finish(),
        )

    def describe(self) -> dict[str, Any]:
        """Settings of its speculation."""
        speculation = self.llm.speculation
        return {
            "engine": "draftwise",
            "policy": self._policy,
            "num_speculative_tokens": speculation.num_speculative_tokens if speculation else 0,
            "lossless": policy_class(self._policy).lossless,
        }

    def close(self) -> None:
        """Release the engine's resources; the shared weights remain loaded."""
        self.llm.close()


def policy_contenders(
    llm: LLM, names: Sequence[str], speculation: SpeculationConfig | None
) -> list[PolicyContender]:
    """Create one contender per policy. Target-only decoding is always included, as the first.

    Args:
        llm: LLM with the target.
        names: names of policies, with an optional maximum draft length and an optional draft:
            ``fixed:3``, ``adaptive@suffix``. The draft is one of those of ``speculation``.
        speculation: models, profiles, and the maximum draft length of the other policies; ``None``
            without a draft, which only permits target-only decoding.

    Raises:
        InvalidParameterError: a policy is unknown, or a model that it requires is missing.
    """
    if speculation is None:
        return [_target_only(llm, name) for name in dict.fromkeys([BASELINE, *names])]
    contenders = []
    source = llm
    for text in dict.fromkeys([BASELINE, *names]):
        name, length, draft = parsed_contender(text)
        if draft is not None and draft not in speculation.draft_names:
            known = ", ".join(speculation.draft_names)
            raise InvalidParameterError("policies", f"{text!r}: the drafts are {known}")
        uses_companion = policy_class(name).uses_companion()
        own = replace(
            speculation,
            policy=name,
            draft=speculation.draft if draft is None else draft,
            companion=speculation.companion if uses_companion else None,
            num_speculative_tokens=speculation.num_speculative_tokens if length is None else length,
        )
        contender = PolicyContender(text, source.with_speculation(own))
        contenders.append(contender)
        # Small models are loaded once. Later contenders share those of the LLM with the most.
        if _num_small_models(contender.llm) > _num_small_models(source):
            source = contender.llm
    return contenders


def _target_only(llm: LLM, name: str) -> PolicyContender:
    if policy_class(parsed_contender(name)[0]).needs_draft:
        raise InvalidParameterError("draft", f"missing: policy {name!r} requires a draft model")
    return PolicyContender(name, llm.with_speculation(None))


def _num_small_models(llm: LLM) -> int:
    return (llm.draft is not None) + (llm.companion is not None)


def parsed_contender(text: str) -> tuple[str, int | None, str | None]:
    """Policy, draft length and draft of a contender such as ``fixed:3@suffix``.

    Raises:
        InvalidParameterError: the draft length is not an integer.
    """
    setting, _, draft = text.partition("@")
    name, _, length = setting.partition(":")
    if length and not length.isdecimal():
        raise InvalidParameterError(
            "policies", f"a draft length must be a non-negative integer, got {length!r}"
        )
    return name, int(length) if length else None, draft or None
