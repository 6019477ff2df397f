"""Interleaved measurement of decoding goodput, with engines that are kept full.

Every policy has its own engine on the same loaded weights. An engine is kept full: when a request
ends, the next prompt is added. The first requests of a batch end at staggered times, so that all
policies have the same distribution of context lengths, on which the step time depends. The engines
take turns of a fraction of a second, in an order that is shuffled every round, so that disturbances
of the machine affect all policies equally. Only steps in which the whole batch generates and no
prompt is processed are counted. Goodput is the number of tokens gained in these steps divided by
their wall time. Policies that learn run some steps before counting starts. The steps of an oracle
are replayed without it, and its tokens are divided by the time of the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftwise.benchmark.contenders import Setting
from draftwise.benchmark.replay import Script, record, replay
from draftwise.benchmark.titles import BASELINE
from draftwise.benchmark.turns import in_turns, ratios_of_turns
from draftwise.core.types import PARTS
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.speculation import SpeculationConfig

# Minimum number of steps in an oracle's script before it is replayed.
_SCRIPTED_STEPS = 30
_FIRST_STEPS = 20
# After this many consecutive steps without a full batch, the batch will never be full.
_MAX_STEPS_NOT_FULL = 2_000
USING_A_PROFILE = {"sv", "sv-predictable", "sv-published", "disco", "specdec++"}
_COUNTED = ("tokens", "steps", "drafted", "verified", "accepted", "scored")
# Assumed maximum number of accepted tokens of a token tree in one step.
_LONGEST_PATH = 6


@dataclass
class Counts:
    """Counts of one policy at one batch size and workload.

    Attributes:
        rounds: tokens and seconds of each turn.
        parts: seconds by part of a step.
        steps: number of engine steps.
        totals: sums over requests: steps, and tokens drafted, verified, accepted, and scored by
            the companion (``scored``).
        context: context tokens of all requests, summed over steps.
    """

    rounds: list[tuple[int, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    context: int = 0

    @property
    def tokens(self) -> int:
        """Tokens gained in all turns."""
        return sum(tokens for tokens, _ in self.rounds)

    @property
    def seconds(self) -> float:
        """Seconds of all turns."""
        return sum(seconds for _, seconds in self.rounds)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each turn."""
        return [tokens / seconds for tokens, seconds in self.rounds]


@dataclass
class BatchContender:
    """One policy with its engine and its counts.

    Attributes:
        name: name in the report.
        policy: name of the policy.
        llm: LLM with an engine of its own.
        static: whether it is a static draft length, of which the best is chosen in hindsight.
        script: the script that an oracle records and its replay repeats.
        prompts: prompts of the workload.
        params: sampling parameters of the workload.
        batch_size: number of requests that run at once.
        num_added: number of requests added so far.
        running: running requests by id.
        counts: counts since :meth:`begin`.
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
        """Whether the policy, or the order of a tree's nodes, adapts to observations."""
        return self.llm.engine.policies.default.learns or self._draws_trees

    @property
    def _draws_trees(self) -> bool:
        return self.llm.speculation is not None and self.llm.speculation.tree_width > 1

    def begin(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        batch_size: int,
        *,
        stop_at_eos: bool = False,
    ) -> None:
        """Start with another workload or batch size."""
        self.restart()
        if self._writes:
            assert self.script is not None
            self.script.clear()
        self.params = replace(params, ignore_eos=not stop_at_eos)
        self.prompts, self.batch_size = prompts, batch_size
        self.counts = Counts()

    def tokens_while_reading(self, prompts: Sequence[list[int]], batch_size: int) -> int:
        """Maximum number of tokens that a request gains while a whole batch is prefilled."""
        speculation = self.llm.speculation
        per_step = 1 if speculation is None else 1 + speculation.num_speculative_tokens
        if self._draws_trees:
            per_step = min(per_step, 1 + _LONGEST_PATH)
        return per_step * -(-batch_size * max(map(len, prompts)) // self.llm.max_chunk_tokens)

    def warm_up(self, num_steps: int) -> None:
        """Run a number of steps without counting."""
        self._run(lambda steps, _: steps >= num_steps, None)
        if self._writes:
            assert self.script is not None
            self.script.clear()
            self._run(lambda steps, _: steps >= _SCRIPTED_STEPS, None)

    @property
    def _writes(self) -> bool:
        return self.script is not None and self.policy == "oracle"

    def restart(self) -> None:
        """Start again with the first prompt, so that all policies have the same prompts."""
        for request in self.running.values():
            self.llm.engine.cancel(request)
        self.running, self.num_added = {}, 0

    def settle(self) -> None:
        """Run without counting until the first batch has ended, so that contexts are staggered."""
        first = list(self._fill())
        self._run(lambda *_: all(request.finish_reason is not None for request in first), None)

    def take_turn(self, seconds: float) -> None:
        """Run until the counted steps have taken ``seconds``."""
        if self._writes:  # the replay repeats the steps of the last turn
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
                if not_full > _MAX_STEPS_NOT_FULL:
                    raise InvalidParameterError(
                        "max_tokens",
                        f"answers of {self.params.max_tokens} tokens are too short to keep a batch "
                        f"of {self.batch_size} full, as prefill takes longer",
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
        """Add requests until the batch is full, and return the running requests."""
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


def batch_contenders(
    llm: LLM, setting: str, speculation: SpeculationConfig, name: str | None = None
) -> list[BatchContender]:
    """Create the contender of a policy, and for an oracle also the contender of its replay.

    Args:
        llm: LLM whose models are shared, if they are those of ``speculation``.
        setting: the policy, with the settings that it does not take from ``speculation``; see
            :class:`~draftwise.benchmark.contenders.Setting`.
        speculation: models, profiles and maximum draft length. The guard is left out, as policies
            are measured as they were published, and the profile if the policy does not use it.
        name: name in the report; ``None`` for the setting.
    """
    policy = Setting.parse(setting).policy
    own = replace(
        Setting.parse(setting).applied_to(speculation),
        guard=False,
        profile=speculation.profile if policy in USING_A_PROFILE else None,
    )
    shown = name or setting
    is_static = policy in (BASELINE, "fixed") and own.tree_width == 1
    first = BatchContender(shown, policy, llm.with_speculation(own), is_static)
    if policy != "oracle":
        return [first]
    first.script = record(first.llm)
    again = llm.with_speculation(replace(own, policy="fixed"))
    replay(again, first.script)
    return [BatchContender(replayed(shown), "replay", again, False, first.script), first]


def replayed(name: str) -> str:
    """Name of the replay of an oracle."""
    return name.replace("oracle", "replay")


def begin(
    contenders: Sequence[BatchContender],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    batch_size: int,
    *,
    stop_at_eos: bool = False,
) -> None:
    """Start all contenders with another workload or batch size.

    Answers are made longer than ``params`` states if the batch would otherwise never be full, as
    far as the models' context permits. Unless answers stop at an end-of-sequence token, no request
    ends before the others are prefilled.

    Args:
        contenders: contenders to start.
        prompts: prompts of the workload.
        params: sampling parameters of all requests.
        batch_size: number of requests that run at once.
        stop_at_eos: let answers stop at an end-of-sequence token. By default they ignore it, so
            that all policies do the same work.
    """
    reading = max(each.tokens_while_reading(prompts, batch_size) for each in contenders)
    room = min(each.llm.engine.max_model_len for each in contenders) - max(map(len, prompts))
    params = replace(params, max_tokens=max(params.max_tokens, min(reading, room)))
    for each in contenders:
        each.begin(prompts, params, batch_size, stop_at_eos=stop_at_eos)


def compete(
    contenders: Sequence[BatchContender],
    rounds: int,
    turn: float,
    warm_up_steps: int,
    first_steps: int = _FIRST_STEPS,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Warm up all contenders, then run them in turns, in an order that changes every round.

    Args:
        contenders: contenders that were started with the same workload and batch size.
        rounds: turns of each contender at a batch size of three or more; see :func:`num_rounds`.
        turn: counted seconds per turn.
        warm_up_steps: untimed steps of policies that learn; 0 for none.
        first_steps: untimed steps of the other policies; 0 for none. After them, every contender
            starts again and runs untimed until its first batch has ended.
        progress: called after every warm-up and every turn.

    Raises:
        InvalidParameterError: a contender would have a single turn, which has no standard error.
    """
    if num_rounds(rounds, contenders[0].batch_size) < 2:
        raise InvalidParameterError("rounds", "must be at least 2 at batch sizes above 2")
    for each in contenders:
        steps = warm_up_steps if each.learns else first_steps
        if steps:
            each.warm_up(steps)
        each.restart()
        each.settle()
        progress()
    for _, each in in_turns(contenders, num_rounds(rounds, contenders[0].batch_size)):
        each.take_turn(turn)
        progress()


def num_rounds(rounds: int, batch_size: int) -> int:
    """Number of rounds; more for small batches, which gain fewer tokens per turn."""
    return rounds * max(1, 4 - batch_size)


def summary(contenders: Sequence[BatchContender]) -> dict[str, Any]:
    """Figures by contender: goodput relative to no speculation, standard errors, and step means.

    An oracle's tokens are its own, and its time is that of its replay.
    """
    counts = {each.name: each.counts for each in contenders}
    base = counts[BASELINE]
    figures: dict[str, Any] = {}
    for each in contenders:
        if each.policy == "replay":
            continue
        own, steps = each.counts, each.counts.steps
        timed = counts.get(replayed(each.name), own)
        seconds_per_step = timed.seconds / timed.steps
        goodput = own.tokens / steps / seconds_per_step
        ratios = ratios_of_turns(own.rates, base.rates)
        request_steps = steps * each.batch_size
        figures[each.name] = {
            "goodput": goodput,
            "ratio": goodput / (base.tokens / base.seconds),
            "standard_error": float(np.std(ratios) / np.sqrt(len(ratios) - 1)),
            "rounds": [round(ratio, 3) for ratio in ratios],
            "static": each.static,
            "steps": steps,
            "tokens_per_request_step": own.tokens / request_steps,
            "drafted_per_request_step": own.totals["drafted"] / request_steps,
            "scored_per_request_step": own.totals["scored"] / request_steps,
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
    """Cross-validated ratio of the best static length.

    The length is chosen on one half of the rounds and evaluated on the other, and vice versa. This
    avoids the selection bias of the maximum of several noisy ratios.
    """
    static = {name: f["rounds"] for name, f in figures.items() if f["static"]}
    scores = []
    for half in (0, 1):
        chosen = max(static, key=lambda name: float(np.mean(static[name][half::2])))
        scores.append(float(np.mean(static[chosen][1 - half :: 2])))
    return float(np.mean(scores))
