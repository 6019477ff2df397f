"""Running again what an oracle chose, without the oracle: what its steps take by themselves.

An oracle asks the target about every drafted token. The time of asking can be left out of the
count, but not what it does to the rest of the step: it empties the caches of the processor. So the
lengths that were drafted and verified are written down, and another engine does the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.core.types import Draft, Judgement, Plan
from draftwise.llm import LLM
from draftwise.policies.base import DraftPosition, Policy, RequestState
from draftwise.policies.priced import PricedPolicy

Lengths = tuple[tuple[int, ...], tuple[int, ...]]


class Script:
    """Lengths drafted and verified in steps, by batch size."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[Lengths]] = {}

    def write(self, drafted: Sequence[int], verified: Sequence[int]) -> None:
        """Append a step: lengths ``[requests]`` that were drafted and verified."""
        steps = self._steps.setdefault(len(drafted), deque(maxlen=4096))
        steps.append((tuple(drafted), tuple(verified)))

    def clear(self) -> None:
        """Forget all steps: another workload begins."""
        self._steps.clear()

    def read(self, num_requests: int) -> Lengths:
        """The next step of so many requests, from the beginning after the end."""
        steps = self._steps.get(num_requests)
        if not steps:
            return (0,) * num_requests, (0,) * num_requests
        steps.rotate(-1)
        return steps[-1]


class Replay(Policy):
    """Drafts and verifies the lengths of a script, whatever is drawn: predictable cuts."""

    name = "replay"
    summary = "the lengths that another policy chose"
    source = "this project"

    def __init__(self, num_speculative_tokens: int, script: Script) -> None:
        """Follow a script."""
        self.num_speculative_tokens = num_speculative_tokens
        self._script = script
        self._drafted: tuple[int, ...] = ()
        self._verified: tuple[int, ...] = ()

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Those of the next step that is written down."""
        self._drafted, self._verified = self._script.read(len(requests))
        pairs = zip(self._drafted, requests, strict=True)
        return [min(length, request.draft_limit) for length, request in pairs]

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Everybody: the lengths are known."""
        return None

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """As much of the draft as is written down."""
        pairs = zip(self._verified, draft.lengths, strict=True)
        kept = tuple(min(verified, drafted) for verified, drafted in pairs)
        if draft.probs is not None:
            ends = torch.tensor(kept, device=draft.probs.device)
            places = torch.arange(draft.probs.shape[1], device=draft.probs.device)
            draft.probs[places >= ends[:, None]] = 0.0
        return Plan(draft.tokens, kept, draft.probs)


def record(llm: LLM) -> Script:
    """Write down what an oracle's engine does from now on.

    Its own step times mislead, so that it goes by the measured costs alone.
    """
    engine, script = llm.engine, Script()
    policy = engine.policies.default
    assert isinstance(policy, PricedPolicy)
    engine.latency = None
    prices, learn = policy.prices, policy.prices.observe

    def as_expected(
        seconds: float, num_drafted: Sequence[int], num_verified: Sequence[int]
    ) -> None:
        learn(prices.work_seconds(num_drafted, num_verified), num_drafted, num_verified)

    prices.observe = as_expected  # type: ignore[method-assign]
    select = policy.select

    def recorded(draft: Draft, judgement: Judgement | None) -> Plan:
        plan = select(draft, judgement)
        script.write(draft.lengths, plan.lengths)
        return plan

    policy.select = recorded  # type: ignore[method-assign]
    return script


def replay(llm: LLM, script: Script) -> None:
    """From now on the engine of ``llm`` does what the script says."""
    policies = llm.engine.policies
    policies.default = Replay(policies.default.num_speculative_tokens, script)
