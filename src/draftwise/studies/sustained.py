"""Policies in engines that are kept full, in short turns: goodput of the decoding alone.

Every policy has an engine of its own on the same loaded weights, kept full: a request that ends is
followed by the next prompt, and the first ones end one after the other, as if they had come one
after the other: a step takes longer with more text behind its requests, and that should be alike
for all. The engines take turns of a fraction of a second, in an order that is shuffled every round,
so that whatever else the machine does meets all alike. Counted are steps in which exactly the batch
size generates and no prompt is read: goodput is tokens gained in them over their wall time.
Policies that learn run some steps before anything is counted. What the oracle chooses is run again
without it, and its tokens are divided by the time of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftwise.benchmark.contenders import BASELINE
from draftwise.core.types import PARTS
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.params import SamplingParams, SpeculationConfig
from draftwise.policies import policy_class
from draftwise.studies.replay import Script, record, replay

# Steps that an oracle's script has at least before it is replayed.
_SCRIPTED_STEPS = 30
_FIRST_STEPS = 20
# So many steps in a row without a full batch: it will never be full.
_MOST_STEPS_NOT_FULL = 2_000
# Of these the right setting follows from what they are told, not from what they have seen.
_NOTHING_TO_LEARN = {
    *("none", "fixed", "svip", "adaedl", "confidence", "disco", "specdec++", "replay"),
}
USING_A_PROFILE = {"adaptive", "sv", "sv-predictable", "sv-published", "disco", "specdec++"}
_COUNTED = ("tokens", "steps", "drafted", "verified", "accepted", "judged")


@dataclass
class Counts:
    """What was counted of one policy at one batch size and workload.

    Attributes:
        rounds: tokens and seconds of each turn.
        parts: seconds by part of a step.
        steps: of the engine.
        totals: over requests: steps, tokens drafted, verified, accepted and judged.
        context: tokens behind the requests, summed over steps.
    """

    rounds: list[tuple[int, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    context: int = 0

    @property
    def tokens(self) -> int:
        """Gained in all turns."""
        return sum(tokens for tokens, _ in self.rounds)

    @property
    def seconds(self) -> float:
        """Of all turns."""
        return sum(seconds for _, seconds in self.rounds)


@dataclass
class Contender:
    """One policy with its engine, and what was counted of it.

    Attributes:
        name: as it is shown.
        policy: name of the policy.
        llm: with an engine of its own.
        static: one of the static draft lengths, the best of which is chosen in hindsight.
        script: what an oracle writes down and another one runs again.
        counts: since :meth:`begin`.
    """

    name: str
    policy: str
    llm: LLM
    static: bool = False
    script: Script | None = None
    prompts: Sequence[list[int]] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    batch_size: int = 1
    num_added: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def learns(self) -> bool:
        """Whether it finds out while it runs what pays."""
        return self.policy not in _NOTHING_TO_LEARN

    def begin(self, prompts: Sequence[list[int]], params: SamplingParams, batch_size: int) -> None:
        """Begin with another workload or batch size."""
        self.restart()
        if self._writes:
            assert self.script is not None
            self.script.clear()
        # A request never ends by itself, so that all do the same work.
        self.params = replace(params, ignore_eos=True)
        self.prompts, self.batch_size = prompts, batch_size
        self.counts = Counts()

    def tokens_while_reading(self, prompts: Sequence[list[int]], batch_size: int) -> int:
        """Most tokens that a request gains while the prompts of a whole batch are read."""
        speculation = self.llm.speculation
        per_step = 1 if speculation is None else 1 + speculation.num_speculative_tokens
        return per_step * -(-batch_size * max(map(len, prompts)) // self.llm.max_chunk_tokens)

    def warm_up(self, num_steps: int) -> None:
        """Run without counting."""
        self._run(lambda steps, _: steps >= num_steps, None)
        if self._writes:
            assert self.script is not None
            self.script.clear()
            self._run(lambda steps, _: steps >= _SCRIPTED_STEPS, None)

    @property
    def _writes(self) -> bool:
        return self.script is not None and self.policy == "oracle"

    def restart(self) -> None:
        """Begin with the first prompt again: how hard the prompts are should be alike for all."""
        for request in self.running.values():
            self.llm.engine.cancel(request)
        self.running, self.num_added = {}, 0

    def settle(self) -> None:
        """Run without counting until all that began together have ended: others are of all ages."""
        first = list(self._fill())
        self._run(lambda *_: all(request.finish_reason is not None for request in first), None)

    def take_turn(self, seconds: float) -> None:
        """Run until so much time was counted."""
        if self._writes:  # what is replayed are the steps of the last turn
            assert self.script is not None
            self.script.clear()
        self._run(lambda _, spent: spent >= seconds, self.counts)

    def _run(self, is_done: Callable[[int, float], bool], counts: Counts | None) -> None:
        engine = self.llm.engine
        tokens, spent, not_full, steps = 0, 0.0, 0, 0
        while not is_done(steps, spent):
            self._fill()
            before, context = self._totals(), sum(len(r.tokens) for r in self.running.values())
            engine.step()
            after = self._totals()
            for key in [k for k, r in self.running.items() if r.finish_reason is not None]:
                request = self.running.pop(key)
                if request.error is not None:
                    raise request.error
            times = engine.times
            generating = after["steps"] - before["steps"]
            if times.num_prompt_tokens or generating != self.batch_size:
                not_full += 1
                if not_full > _MOST_STEPS_NOT_FULL:
                    raise InvalidParameterError(
                        "max_tokens",
                        f"{self.params.max_tokens} tokens of an answer are too few to keep a batch "
                        f"of {self.batch_size} full: reading prompts takes longer",
                    )
                continue
            not_full = 0
            steps += 1
            tokens += after["tokens"] - before["tokens"]
            spent += times.total
            if counts is not None:
                counts.steps += 1
                counts.context += context
                for name in _COUNTED:
                    counts.totals[name] += after[name] - before[name]
                for part in PARTS:
                    counts.parts[part] += getattr(times, part)
        if counts is not None:
            counts.rounds.append((tokens, spent))

    def _fill(self) -> Iterable[Request]:
        """As many requests as the batch has; those that run."""
        while self.llm.engine.num_unfinished < self.batch_size:
            self._add()
        return self.running.values()

    def _add(self) -> None:
        ids = self.prompts[self.num_added % len(self.prompts)]
        params = self.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + self.num_added)
        if self.num_added < self.batch_size:
            ends = -(-params.max_tokens * (self.num_added + 1) // self.batch_size)
            params = replace(params, max_tokens=ends)
        request = self.llm.engine.add(None, list(ids), params)
        self.running[request.request_id] = request
        self.num_added += 1

    def _totals(self) -> dict[str, int]:
        stats = [r.stats for r in self.running.values()]
        return {name: sum(getattr(s, f"num_{name}") for s in stats) for name in _COUNTED}


def contender(
    llm: LLM, policy: str, speculation: SpeculationConfig, name: str | None = None
) -> list[Contender]:
    """A policy on the target of ``llm``, and with an oracle the one that runs its steps again.

    Args:
        llm: whose models are shared where they are those of ``speculation``.
        policy: its name.
        speculation: models, profiles and longest draft; a profile and a companion are left out
            where the policy has no use for them.
        name: as it is shown; ``None`` for the policy's.
    """
    needs = policy_class(policy)
    own = replace(
        speculation,
        policy=policy,
        companion=speculation.companion if needs.uses_companion() else None,
        profile=speculation.profile if policy in USING_A_PROFILE else None,
    )
    shown = name or policy
    first = Contender(shown, policy, llm.with_speculation(own), policy in ("none", "fixed"))
    if policy != "oracle":
        return [first]
    first.script = record(first.llm)
    again = llm.with_speculation(replace(own, policy="fixed"))
    replay(again, first.script)
    return [Contender(replayed(shown), "replay", again, False, first.script), first]


def replayed(name: str) -> str:
    """What the run that repeats an oracle's steps is called."""
    return name.replace("oracle", "replay")


def begin(
    everybody: Sequence[Contender],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    batch_size: int,
) -> None:
    """All begin with another workload or batch size, and with answers of the same length.

    They are longer than ``params`` says where the batch would never be full, or else as long as
    there is room for: none may end before the prompts of the others are read.
    """
    reading = max(each.tokens_while_reading(prompts, batch_size) for each in everybody)
    room = min(each.llm.engine.max_model_len for each in everybody) - max(map(len, prompts))
    params = replace(params, max_tokens=max(params.max_tokens, min(reading, room)))
    for each in everybody:
        each.begin(prompts, params, batch_size)


def compete(
    everybody: Sequence[Contender],
    rounds: int,
    turn: float,
    warm_up_steps: int,
    first_steps: int = _FIRST_STEPS,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Warm up, then take turns; the order changes from round to round.

    Args:
        everybody: all have begun with the same workload and batch size.
        rounds: turns of each at four requests or more; see :func:`num_rounds`.
        turn: seconds that are counted per turn.
        warm_up_steps: untimed steps of policies that learn; 0 for none.
        first_steps: untimed steps of the others; 0 for none.
        progress: called after every warm-up and every turn.
    """
    for each in everybody:
        steps = warm_up_steps if each.learns else first_steps
        if steps:
            each.warm_up(steps)
            each.restart()
            each.settle()
        progress()
    order = list(everybody)
    shuffle = random.Random(0)
    for _ in range(num_rounds(rounds, everybody[0].batch_size)):
        shuffle.shuffle(order)
        for each in order:
            each.take_turn(turn)
            progress()


def num_rounds(rounds: int, batch_size: int) -> int:
    """More where a turn tells less: a small batch gains few tokens in it."""
    return rounds * max(1, 4 - batch_size)


def summary(everybody: Sequence[Contender]) -> dict[str, Any]:
    """By contender: ratios to no speculation with standard errors over rounds, and what was done.

    Of the oracle the tokens are its own and the time that of its steps without it.
    """
    counts = {each.name: each.counts for each in everybody}
    base = counts[BASELINE]
    figures: dict[str, Any] = {}
    for each in everybody:
        if each.policy == "replay":
            continue
        own, steps = each.counts, each.counts.steps
        timed = counts.get(replayed(each.name), own)
        seconds_per_step = timed.seconds / timed.steps
        goodput = own.tokens / steps / seconds_per_step
        ratios = [
            (t / s) / (bt / bs) for (t, s), (bt, bs) in zip(own.rounds, base.rounds, strict=True)
        ]
        request_steps = steps * each.batch_size
        figures[each.name] = {
            "goodput": goodput,
            "ratio": goodput / (base.tokens / base.seconds),
            "standard_error": float(np.std(ratios) / np.sqrt(max(len(ratios) - 1, 1))),
            "rounds": [round(ratio, 3) for ratio in ratios],
            "static": each.static,
            "steps": steps,
            "tokens_per_request_step": own.tokens / request_steps,
            "drafted_per_request_step": own.totals["drafted"] / request_steps,
            "judged_per_request_step": own.totals["judged"] / request_steps,
            "verified_per_request_step": own.totals["verified"] / request_steps,
            "acceptance_rate": own.totals["accepted"] / max(own.totals["verified"], 1),
            "share_of_time": {part: own.parts[part] / own.seconds for part in PARTS},
            "step_ms": 1e3 * seconds_per_step,
            "context_per_request": own.context / request_steps,
        }
    return figures


def best_static(figures: Mapping[str, Any]) -> str:
    """The static length with the best ratio, chosen in hindsight."""
    static = {name: f["ratio"] for name, f in figures.items() if f["static"]}
    return max(static, key=lambda name: static[name])


def best_static_unbiased(figures: Mapping[str, Any]) -> float:
    """The best static length chosen on one half of the rounds, as it did on the other half.

    The best of several noisy figures is better than it should be; this one is not.
    """
    static = {name: f["rounds"] for name, f in figures.items() if f["static"]}
    scores = []
    for half in (0, 1):
        chosen = max(static, key=lambda name: float(np.mean(static[name][half::2])))
        scores.append(float(np.mean(static[chosen][1 - half :: 2])))
    return float(np.mean(scores))
