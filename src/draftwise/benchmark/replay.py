"""Replay of the draft and verification lengths of an oracle, to time its steps without the oracle.

An oracle queries the target after every drafted token. The time of the queries can be excluded, but
not their side effects on the rest of the step, as they evict the processor's caches. Therefore the
drafted and verified lengths are recorded, and a second engine repeats them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.llm import LLM
from draftwise.policies.base import DraftPlan, Policy
from draftwise.policies.inputs import RequestState
from draftwise.policies.oracle import Oracle

Lengths = tuple[tuple[int, ...], tuple[int, ...]]


class Script:
    """Recorded draft and verification lengths of steps, by batch size."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[Lengths]] = {}

    def write(self, drafted: Sequence[int], verified: Sequence[int]) -> None:
        """Append a step: its drafted and verified lengths, ``[requests]`` each."""
        steps = self._steps.setdefault(len(drafted), deque(maxlen=4096))
        steps.append((tuple(drafted), tuple(verified)))

    def clear(self) -> None:
        """Discard all steps, at the start of another workload."""
        self._steps.clear()

    def read(self, num_requests: int) -> Lengths:
        """Return the next step with ``num_requests`` requests, cyclically."""
        steps = self._steps.get(num_requests)
        if not steps:
            return (0,) * num_requests, (0,) * num_requests
        steps.rotate(-1)
        return steps[-1]


class Replay(Policy):
    """Drafts and verifies the lengths of a script, independently of the drafted tokens."""

    name = "replay"
    summary = "the recorded lengths of another policy"
    source = "this project"

    def __init__(self, num_speculative_tokens: int, script: Script) -> None:
        """Create a policy that repeats a script."""
        self.num_speculative_tokens = num_speculative_tokens
        self._script = script
        self._verified: tuple[int, ...] = ()

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The lengths of the next recorded step."""
        drafted, self._verified = self._script.read(len(requests))
        return DraftPlan(drafted)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Verify as many tokens as recorded."""
        pairs = zip(self._verified, draft.lengths, strict=True)
        kept = tuple(min(verified, drafted) for verified, drafted in pairs)
        if draft.probs is not None:
            ends = torch.tensor(kept, device=draft.probs.device)
            places = torch.arange(draft.probs.shape[1], device=draft.probs.device)
            draft.probs[places >= ends[:, None]] = 0.0
        return Plan(draft.tokens, kept, draft.probs)


def record(llm: LLM) -> Script:
    """Record the lengths that an oracle's engine chooses from now on.

    The engine's own step times include the oracle's queries, so its policy uses profiled costs
    alone.
    """
    engine, script = llm.engine, Script()
    policy = engine.policies.default
    assert isinstance(policy, Oracle)
    engine.latency = engine.policies.guard = policy.guard = None
    select = policy.select

    def recorded(draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        plan = select(draft, companion_scores)
        script.write(draft.lengths, plan.lengths)
        return plan

    policy.select = recorded  # type: ignore[method-assign]
    return script


def replay(llm: LLM, script: Script) -> None:
    """Make the engine of ``llm`` repeat a script from now on."""
    policies = llm.engine.policies
    policies.default = Replay(policies.default.num_speculative_tokens, script)
