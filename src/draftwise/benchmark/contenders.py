"""Contenders of a benchmark: Draftwise's policies, and the interface for other engines."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

from draftwise.benchmark.recorder import Recorder, StepRecords
from draftwise.benchmark.titles import BASELINE
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.policies import policy_class
from draftwise.speculation import SpeculationConfig


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
            DraftwiseError: it failed, and is excluded from further turns.
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
        learns: whether the policy, or the order of a tree's nodes, adapts to observations.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        """Create a contender."""
        self.name = name
        self.llm = llm
        self._policy = BASELINE if llm.speculation is None else llm.speculation.policy_name
        self._draws_trees = llm.speculation is not None and llm.speculation.tree_width > 1
        self.learns = llm.engine.policies.default.learns or self._draws_trees

    def refusal(self, batch_size: int, params: SamplingParams) -> None:
        """Supports everything."""

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Turn:
        """Answer all prompts at once, and record every step.

        Raises:
            DraftwiseError: a prompt was not answered.
        """
        recorder = Recorder(draws_chains=not self._draws_trees)
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
        for output in outputs:
            if output.error is not None:
                raise output.error
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
            "tree_width": speculation.tree_width if speculation else 1,
            "lossless": policy_class(self._policy).lossless,
        }

    def close(self) -> None:
        """Release the engine's resources; the shared weights remain loaded."""
        self.llm.close()


class Setting(NamedTuple):
    """A policy and its settings, written as ``fixed:3``, ``adaptive@suffix`` or ``eagle2:16x4``.

    Attributes:
        policy: name of the policy.
        length: maximum draft length, or number of nodes of a token tree; ``None`` if not given.
        width: maximum number of alternatives for each token of a tree; ``None`` if not given.
        draft: the draft; ``None`` if not given.
    """

    policy: str
    length: int | None = None
    width: int | None = None
    draft: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``POLICY[:LENGTH[xWIDTH]][@DRAFT]``.

        Raises:
            InvalidParameterError: a number is not an integer.
        """
        setting, _, draft = text.partition("@")
        name, _, numbers = setting.partition(":")
        found = re.fullmatch(r"([0-9]*)(?:x([0-9]+))?", numbers)
        if found is None:
            raise InvalidParameterError(
                "policies",
                f"a draft length and a tree width must be non-negative integers, got {numbers!r}",
            )
        length, width = (int(number) if number else None for number in found.groups())
        return cls(name, length, width, draft or None)

    def applied_to(self, speculation: SpeculationConfig) -> SpeculationConfig:
        """The configuration of this policy, without the companion if it asks none.

        Args:
            speculation: models, profiles, and the settings that are not given here.
        """
        length, width = self.length, self.width
        return replace(
            speculation,
            policy=self.policy,
            draft=speculation.draft if self.draft is None else self.draft,
            companion=speculation.companion if policy_class(self.policy).uses_companion() else None,
            num_speculative_tokens=speculation.num_speculative_tokens if length is None else length,
            tree_width=speculation.tree_width if width is None else width,
        )


def policy_contenders(
    llm: LLM, names: Sequence[str], speculation: SpeculationConfig | None
) -> list[PolicyContender]:
    """Create one contender per policy. Target-only decoding is always included, as the first.

    Args:
        llm: LLM with the target.
        names: names of policies, with optional settings; see :class:`Setting`. The draft is one of
            those of ``speculation``.
        speculation: models, profiles, and the settings that a name leaves out; ``None`` without a
            draft, which only permits target-only decoding.

    Raises:
        InvalidParameterError: a policy is unknown, or a model that it requires is missing.
    """
    if speculation is None:
        return [_target_only(llm, name) for name in dict.fromkeys([BASELINE, *names])]
    contenders = []
    source = llm
    for text in dict.fromkeys([BASELINE, *names]):
        setting = Setting.parse(text)
        if setting.draft is not None and setting.draft not in speculation.draft_names:
            known = ", ".join(speculation.draft_names)
            raise InvalidParameterError("policies", f"{text!r}: the drafts are {known}")
        own = setting.applied_to(speculation)
        contender = PolicyContender(text, source.with_speculation(own))
        contenders.append(contender)
        # Small models are loaded once. Later contenders share those of the LLM with the most.
        if _num_small_models(contender.llm) > _num_small_models(source):
            source = contender.llm
    return contenders


def _target_only(llm: LLM, name: str) -> PolicyContender:
    if policy_class(Setting.parse(name).policy).needs_draft:
        raise InvalidParameterError("draft", f"missing: policy {name!r} requires a draft model")
    return PolicyContender(name, llm.with_speculation(None))


def _num_small_models(llm: LLM) -> int:
    return (llm.draft is not None) + (llm.companion is not None)
