"""Who takes part in a benchmark: policies of ours, and other engines in their own processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from draftwise.benchmark.recorder import Recorder, StepRecords
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.params import SamplingParams, SpeculationConfig
from draftwise.policies import policy_class

BASELINE = "none"


@dataclass(frozen=True)
class Turn:
    """One timed call: a batch of prompts, answered.

    Attributes:
        seconds: wall time of the whole call, prompts included.
        answers: generated tokens, one list per prompt.
        finished: seconds from the start until each answer was complete, one per prompt; empty if
            the engine does not say.
        gains: tokens gained step by step, one list per prompt; empty if the engine does not say.
        records: what its steps did; ``None`` if the engine does not say.
        counts: what another engine counted of its speculation, by its own names.
    """

    seconds: float
    answers: list[list[int]]
    finished: list[float] = field(default_factory=list)
    gains: list[list[int]] = field(default_factory=list)
    records: StepRecords | None = None
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.answers))


class Contender(Protocol):
    """Somebody who can answer a batch of prompts.

    Attributes:
        name: as it is shown.
        learns: whether it finds out while it runs what pays.
    """

    name: str
    learns: bool

    def can_run(self, batch_size: int, temperature: float) -> bool:
        """Whether it can answer so many prompts at once at this temperature."""

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once.

        Raises:
            PeerError: another engine failed; it takes no further part.
        """

    def describe(self) -> dict[str, Any]:
        """Versions and settings, as plain values."""

    def close(self) -> None:
        """Give back what it holds."""


class PolicyContender:
    """One of our policies, in an engine of its own on shared weights.

    Attributes:
        name: of the policy, with the draft length where several take part.
        llm: its engine.
        learns: whether the policy finds out while it runs what pays.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        """Take part under a name."""
        self.name = name
        self.llm = llm
        self._policy = BASELINE if llm.speculation is None else llm.speculation.policy_name
        self.learns = policy_class(self._policy).needs_latency

    def can_run(self, batch_size: int, temperature: float) -> bool:
        """Always."""
        return True

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once, following every step."""
        recorder = Recorder()
        engine = self.llm.engine
        ended: dict[Request, float] = {}

        def on_step(requests: list[Request]) -> None:
            recorder.take(requests, engine.times)
            now = time.perf_counter() - start
            ended.update((r, now) for r in requests if r.finish_reason is not None)

        # What a study's policy is told takes time that no policy would spend.
        told_before = engine.uncounted_seconds
        start = time.perf_counter()
        outputs = self.llm.generate(list(prompts), list(params), on_step)
        seconds = time.perf_counter() - start - (engine.uncounted_seconds - told_before)
        order = sorted(recorder.gains, key=lambda request: request.request_id)
        return Turn(
            seconds,
            [output.token_ids for output in outputs],
            [ended[request] for request in order],
            [recorder.gains[request] for request in order],
            recorder.finish(),
        )

    def describe(self) -> dict[str, Any]:
        """How it speculates."""
        speculation = self.llm.speculation
        return {
            "engine": "draftwise",
            "policy": self._policy,
            "num_speculative_tokens": speculation.num_speculative_tokens if speculation else 0,
            "lossless": policy_class(self._policy).lossless,
        }

    def close(self) -> None:
        """End what its engine has beside the weights, which are everybody's."""
        self.llm.close()


def policy_contenders(
    llm: LLM, names: Sequence[str], speculation: SpeculationConfig | None
) -> list[PolicyContender]:
    """One for each policy; target-only decoding comes first, whether it is named or not.

    Args:
        llm: with the target.
        names: of policies, each with a longest draft of its own if one is given: ``fixed:3``.
        speculation: models, profiles and the longest draft of all others; ``None`` without a
            draft, for target-only decoding alone.

    Raises:
        InvalidParameterError: a policy does not exist or cannot do without what is missing.
    """
    if speculation is None:
        return [_target_only(llm, name) for name in dict.fromkeys([BASELINE, *names])]
    contenders = []
    source = llm
    for text in dict.fromkeys([BASELINE, *names]):
        name, _, length = text.partition(":")
        uses_companion = policy_class(name).uses_companion()
        own = replace(
            speculation,
            policy=name,
            companion=speculation.companion if uses_companion else None,
            num_speculative_tokens=_length(length)
            if length
            else speculation.num_speculative_tokens,
        )
        contender = PolicyContender(text, source.with_speculation(own))
        contenders.append(contender)
        # Small models are loaded once: from now on they are shared by way of who has most.
        if _num_followers(contender.llm) > _num_followers(source):
            source = contender.llm
    return contenders


def _target_only(llm: LLM, name: str) -> PolicyContender:
    if policy_class(name.partition(":")[0]).needs_draft:
        raise InvalidParameterError("draft", f"missing: policy {name!r} needs one")
    return PolicyContender(name, llm.with_speculation(None))


def _num_followers(llm: LLM) -> int:
    return (llm.draft is not None) + (llm.companion is not None)


def _length(text: str) -> int:
    if not text.isdecimal():
        raise InvalidParameterError(
            "policies", f"a draft length must be a whole number, got {text!r}"
        )
    return int(text)
