"""Simulated goodput of `adaptive`, `sv` and `sv-predictable` on recorded drafts.

    python benchmarks/pricing.py record drafts.npz --prompts gsm8k_test.jsonl humaneval.jsonl
    python benchmarks/pricing.py simulate drafts.npz --output pricing.json

``record`` runs plain speculative decoding with the bundled models. For every drafted token it
records the signals and the acceptance probability. ``simulate`` runs the policies themselves on
these drafts. A policy gets the signals of one token at a time. After each step it gets the
acceptance of the tokens that it selected for verification. The simulation runs no model and reads
no clock. The duration of a step comes from a modelled machine, so the load of this machine has no
effect.

The result is goodput (expected tokens per modelled second) relative to that of the best static
draft length in hindsight, by machine, scenario, temperature and batch size. Only steps after
``--warm-up`` count. The scenarios are:

- ``steady``: step times vary by 5 %, one step in 100 takes three times as long.
- ``ragged``: passes in which requests have different numbers of tokens take 10 % longer.
- ``pace``: the whole machine is 1.5 times as slow for 110 steps out of 220.
- ``wrong``: a token in the target's pass costs twice as much as the latency profile says.
- ``tiles``: passes take as long as the next multiple of 16 tokens, which no profile contains.
- ``change``: the workload changes in the middle, from the first prompt file to the last.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.workload import chat_prompts
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import CompanionScores, Draft, DraftSignals, Outcome, StepTimes
from draftwise.policies import DraftPosition, PolicyContext, RequestState, create_policy
from draftwise.policies.base import Policy
from draftwise.profiling.acceptance import collect

Floats = NDArray[np.float64]

LONGEST = 7
CONTEXT = 200
SIGNALS = ("token_prob", "entropy", "history", "overlap", "agreement", "acceptance")
SCENARIOS = ("steady", "ragged", "pace", "wrong", "tiles", "change")


@dataclass(frozen=True)
class Machine:
    """What passes take, in seconds.

    Attributes:
        target: by the tokens of a pass.
        draft: by the requests that draft.
        companion: by the drafted tokens that it scores.
        signals: looking at the signals of a step's drafts, and for each request.
    """

    target: StageCost
    draft: StageCost
    companion: StageCost
    signals: tuple[float, float]


def milliseconds(points: dict[float, float]) -> StageCost:
    return StageCost(tuple(map(float, points)), tuple(ms / 1000 for ms in points.values()))


# The first two after the steps measured in benchmarks/results/goodput_gsm8k.json and
# goodput_no_matrix_unit.json; an accelerator is flat up to a knee and launches many small kernels
# for a pass of the draft.
MACHINES = {
    "matrix": Machine(
        milliseconds(
            {1: 16.2, 4: 16.6, 8: 18.5, 16: 20.5, 32: 26.0, 48: 34.0, 64: 41.0, 96: 54.0, 128: 65.0}
            | {192: 100.0, 256: 121.0}
        ),
        milliseconds({1: 0.25, 8: 0.4, 16: 0.55, 32: 0.9}),
        milliseconds({1: 1.4, 8: 1.8, 32: 3.2, 128: 8.0, 256: 15.0}),
        (0.0003, 0.00002),
    ),
    "plain": Machine(
        milliseconds(
            {1: 7.5, 4: 9.4, 8: 10.0, 16: 11.2, 32: 19.0, 48: 27.0, 64: 35.5, 96: 52.0, 128: 67.0}
            | {192: 98.0, 256: 132.0}
        ),
        milliseconds({1: 0.15, 8: 0.22, 16: 0.3, 32: 0.5}),
        milliseconds({1: 0.8, 8: 1.1, 32: 2.2, 128: 6.0, 256: 12.0}),
        (0.0003, 0.00002),
    ),
    "flat": Machine(
        milliseconds({1: 10.0, 256: 10.8, 512: 20.0}),
        milliseconds({1: 0.8, 32: 0.9}),
        milliseconds({1: 2.0, 256: 2.3}),
        (0.0003, 0.000005),
    ),
    "knee": Machine(
        milliseconds({1: 10.0, 48: 10.6, 64: 12.5, 256: 45.0}),
        milliseconds({1: 1.2, 32: 1.4}),
        milliseconds({1: 2.5, 256: 3.5}),
        (0.0003, 0.000005),
    ),
}


class Drafts:
    """Recorded drafts of one workload, all of the same length.

    Attributes:
        columns: by signal ``[drafts, length]`` float64.
    """

    def __init__(self, columns: dict[str, Floats]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["acceptance"])

    @classmethod
    def load(cls, path: Path, temperature: str) -> list[Drafts]:
        """Of all workloads, in the order in which they were recorded."""
        with np.load(path) as file:
            names = [n.split("/") for n in file.files]
            workloads = dict.fromkeys(n[1] for n in names if n[0] == temperature)
            return [
                cls({s: file[f"{temperature}/{w}/{s}"].astype(np.float64) for s in SIGNALS})
                for w in workloads
            ]


def record(arguments: argparse.Namespace) -> None:
    """Write the signals of whole drafts of every workload and temperature to a file."""
    torch.set_num_threads(2)
    speculation = SpeculationConfig(arguments.draft, arguments.companion, policy="sv")
    llm = LLM(arguments.target, speculation, dtype="float32")
    models = llm.load_models(speculation)
    columns: dict[str, Floats] = {}
    for path in arguments.prompts:
        prompts = chat_prompts(llm, [path], arguments.num_prompts, 300)
        for temperature in (0, 1):
            params = SamplingParams(
                max_tokens=arguments.max_tokens, temperature=float(temperature), seed=0
            )
            records = collect(models, prompts, params, num_speculative_tokens=LONGEST).records
            starts = np.flatnonzero(records.position == 0)
            lengths = np.diff(np.append(starts, len(records)))
            whole = starts[lengths >= LONGEST][:, None] + np.arange(LONGEST)
            for name in SIGNALS:
                columns[f"{temperature}/{path.stem}/{name}"] = getattr(records, name)[whole]
            accepted = records.acceptance[whole]
            print(path.stem, temperature, len(whole), accepted[:, 0].mean().round(3), flush=True)
    np.savez_compressed(arguments.drafts, **columns)


@dataclass(frozen=True)
class Scenario:
    """A machine, and how it differs from its latency profile.

    Attributes:
        machine: as its profile says.
        name: what it has to cope with; one of ``SCENARIOS``.
    """

    machine: Machine
    name: str

    def target_seconds(self, lengths: Sequence[int]) -> float:
        """The target's pass over so many drafted tokens of each request."""
        size = len(lengths) + sum(lengths)
        if self.name == "tiles":
            size = 16 * math.ceil(size / 16)
        seconds = self.machine.target(size)
        if self.name == "wrong":
            seconds += seconds - self.machine.target(len(lengths))
        if self.name == "ragged" and len(set(lengths)) > 1:
            seconds *= 1.1
        return seconds

    def pace(self, step: int) -> float:
        """How much slower everything is in a step."""
        return 1.5 if self.name == "pace" and step % 220 >= 110 else 1.0


class Simulation:
    """Steps of a policy on recorded drafts."""

    def __init__(
        self,
        scenario: Scenario,
        drafts: Sequence[Drafts],
        batch_size: int,
        greedy: bool,
        num_steps: int,
        seed: int,
    ) -> None:
        self._scenario, self._drafts = scenario, drafts
        self._batch_size, self._greedy, self._num_steps = batch_size, greedy, num_steps
        self._random = np.random.default_rng(seed)
        self._numbers = np.arange(batch_size)

    def _steps(self) -> Iterator[dict[str, Floats]]:
        """The drafts of each step; every request goes on in its own text."""
        changes = self._scenario.name == "change"
        starts = self._random.random(self._batch_size)
        for step in range(self._num_steps):
            late = changes and step >= self._num_steps // 2
            drafts = self._drafts[-1 if late else 0]
            rows = ((starts * len(drafts)).astype(np.int64) + step) % len(drafts)
            yield {name: column[rows] for name, column in drafts.columns.items()}

    def static(self, warm_up: int) -> list[float]:
        """Goodput of the fixed draft lengths from 0 on."""
        machine, size = self._scenario.machine, self._batch_size
        lengths = range(LONGEST + 1)
        work = [
            length * machine.draft(size) + self._scenario.target_seconds([length] * size)
            for length in lengths
        ]
        tokens, seconds = np.zeros(LONGEST + 1), 0.0
        for step, drafts in enumerate(self._steps()):
            if step >= warm_up:
                kept = drafts["acceptance"].cumprod(axis=1).sum(axis=0)
                tokens += size + np.concatenate([[0.0], np.cumsum(kept)])
                seconds += self._scenario.pace(step)
        goodput: list[float] = (tokens / (np.array(work) * seconds)).tolist()
        return goodput

    def run(self, policy: Policy, latency: LatencyModel, warm_up: int) -> dict[str, float]:
        """What a policy does."""
        totals = dict.fromkeys(("tokens", "seconds", "drafted", "verified", "scored"), 0.0)
        for step, drafts in enumerate(self._steps()):
            done = self._step(step, policy, latency, drafts)
            if step >= warm_up:
                for name, value in done.items():
                    totals[name] += value
        totals["goodput"] = totals["tokens"] / totals["seconds"]
        return totals

    def _step(
        self, step: int, policy: Policy, latency: LatencyModel, drafts: dict[str, Floats]
    ) -> dict[str, float]:
        size, machine = self._batch_size, self._scenario.machine
        history = drafts["history"][:, 0].tolist()
        states = [
            RequestState(CONTEXT, 20, LONGEST, number, self._greedy, mean)
            for number, mean in enumerate(history)
        ]
        limits = policy.draft_lengths(states)
        watched = policy.uses_draft_signals()
        lengths, counts = self._draft(policy, limits, watched, drafts)
        draft = self._written(drafts, lengths, watched)
        scores = None
        if watched and any(lengths) and policy.wants_companion():
            scores = self._scored(drafts, draft)
        plan = policy.select(draft, scores)
        pace = self._scenario.pace(step) * math.exp(0.05 * self._random.standard_normal())
        pace *= 3.0 if self._random.random() < 0.01 else 1.0
        fixed, each = machine.signals
        draft_seconds = pace * sum(machine.draft(count) for count in counts)
        looking = pace * (fixed + each * size) if watched and any(lengths) else 0.0
        scoring = pace * machine.companion(sum(lengths)) if scores is not None else 0.0
        verify = pace * self._scenario.target_seconds(plan.lengths)
        times = StepTimes(draft_seconds, scoring, looking, verify, 0.0, 0.0)
        self._learn_costs(latency, times, draft, counts, plan.lengths)
        width = max(lengths, default=0)
        inside = np.arange(width) < np.array(plan.lengths)[:, None]
        acceptance = drafts["acceptance"][:, :width] * inside
        kept = acceptance.cumprod(axis=1)
        nothing = (0,) * size
        policy.observe(
            Outcome(
                tuple(lengths),
                tuple(plan.lengths),
                nothing,
                nothing,
                torch.from_numpy(acceptance).float(),
                frozenset(),
                torch.from_numpy(kept).float(),
            ),
            times,
        )
        # The expectation of what is gained, over the time without what is chance.
        return {
            "tokens": size + float(kept.sum()),
            "seconds": times.total / pace * self._scenario.pace(step),
            "drafted": float(sum(lengths)),
            "verified": float(sum(plan.lengths)),
            "scored": float(scores is not None),
        }

    def _draft(
        self, policy: Policy, limits: Sequence[int], watched: bool, drafts: dict[str, Floats]
    ) -> tuple[list[int], list[int]]:
        """How many tokens each request drafts, and how many requests draft at each position."""
        lengths, counts = [0] * self._batch_size, []
        active = [row for row, limit in enumerate(limits) if limit > 0]
        asks = policy.may_stop_drafting()
        place = 0
        while active:
            counts.append(len(active))
            for row in active:
                lengths[row] += 1
            going = None
            if asks:
                q, h = (
                    torch.from_numpy(drafts[name][active, place]).float() if watched else None
                    for name in ("token_prob", "entropy")
                )
                tokens = torch.zeros(len(active), dtype=torch.long)
                going = policy.keep_drafting(DraftPosition(place, active, tokens, None, h, q))
            stays = [True] * len(active) if going is None else going.tolist()
            place += 1
            active = [
                r for r, goes in zip(active, stays, strict=True) if goes and limits[r] > place
            ]
        return lengths, counts

    def _written(self, drafts: dict[str, Floats], lengths: list[int], watched: bool) -> Draft:
        """A draft over three tokens, of which the first one is always drawn."""
        width = max(lengths, default=0)
        tokens = torch.zeros(self._batch_size, width, dtype=torch.long)
        signals = None
        if watched:
            inside = np.arange(width) < np.array(lengths)[:, None]
            q, h = (
                torch.from_numpy(drafts[name][:, :width] * inside).float()
                for name in ("token_prob", "entropy")
            )
            probs = torch.stack([q, (1 - q) * torch.from_numpy(inside), torch.zeros_like(q)], dim=2)
            signals = DraftSignals(probs, h, q)
        return Draft(tokens, tuple(lengths), None, signals=signals)

    def _scored(self, drafts: dict[str, Floats], draft: Draft) -> CompanionScores:
        """A companion's distributions with the recorded S and A of the drawn tokens."""
        assert draft.signals is not None
        width = draft.tokens.shape[1]
        q = draft.signals.token_probs
        inside = torch.arange(width) < torch.tensor(draft.lengths)[:, None]
        overlap, agreement = (
            torch.from_numpy(drafts[name][:, :width]).float() * inside
            for name in ("overlap", "agreement")
        )
        drawn = agreement * q
        other = torch.minimum((overlap - drawn).clamp(min=0), 1 - q)
        probs = torch.stack([drawn, other, (1 - drawn - other).clamp(min=0)], dim=2)
        return CompanionScores(probs * inside.unsqueeze(2), overlap, agreement)

    @staticmethod
    def _learn_costs(
        latency: LatencyModel,
        times: StepTimes,
        draft: Draft,
        counts: Sequence[int],
        verified: Sequence[int],
    ) -> None:
        """As the engine does, which learns from fewer steps once it has seen some."""
        latency.observe_step(
            num_target_tokens=len(verified) + sum(verified),
            context=len(verified) * CONTEXT,
            drafting=counts,
            num_scored=sum(draft.lengths) if times.companion else 0,
            has_signals=draft.signals is not None,
            is_regular=len(set(verified)) == 1,
            target_seconds=times.verify,
            draft_seconds=times.draft,
            companion_seconds=times.companion,
        )


@dataclass(frozen=True)
class Job:
    """One cell of the result."""

    drafts: Path
    machine: str
    scenario: str
    temperature: str
    batch_size: int
    policies: tuple[str, ...]
    num_steps: int
    warm_up: int
    seed: int
    options: str

    @property
    def cell(self) -> str:
        return f"{self.machine} {self.scenario} T={self.temperature} b={self.batch_size}"


def simulated(job: Job) -> tuple[str, dict[str, Any]]:
    """Goodput of all policies and of the best static length in one cell."""
    torch.set_num_threads(1)
    drafts = Drafts.load(job.drafts, job.temperature)
    machine = MACHINES[job.machine]
    scenario = Scenario(machine, job.scenario)

    def simulation() -> Simulation:
        greedy = job.temperature == "0"
        return Simulation(scenario, drafts, job.batch_size, greedy, job.num_steps, job.seed)

    static = simulation().static(job.warm_up)
    best = int(np.argmax(static))
    result: dict[str, Any] = {"best_static": best, "over_none": static[best] / static[0]}
    for name in job.policies:
        latency = LatencyModel(machine.target, machine.draft, machine.companion)
        context = PolicyContext(LONGEST, latency, None, has_companion=True)
        policy = create_policy(name, context, json.loads(job.options))
        done = simulation().run(policy, latency, job.warm_up)
        per_step = (job.num_steps - job.warm_up) * job.batch_size
        result[name] = {
            "over_best_static": done["goodput"] / static[best],
            "drafted": done["drafted"] / per_step,
            "verified": done["verified"] / per_step,
            "scored": done["scored"] / (job.num_steps - job.warm_up),
        }
    return job.cell, result


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def show(results: dict[str, Any], policies: Sequence[str], baseline: dict[str, Any] | None) -> None:
    """Means and worst cells, by scenario and in all."""
    scenarios = dict.fromkeys(cell.split()[1] for cell in results)
    for policy in policies:
        for chosen in (*scenarios, "all"):
            cells = [c for c in results if chosen in ("all", c.split()[1])]
            ratios = {c: results[c][policy]["over_best_static"] for c in cells}
            worst = min(ratios, key=ratios.__getitem__)
            line = f"{policy:15} {chosen:8} mean {geometric_mean(list(ratios.values())):.4f}"
            line += f"  worst {ratios[worst]:.3f} ({worst})"
            if baseline is not None:
                changes = {
                    c: ratios[c] / baseline[c][policy]["over_best_static"]
                    for c in cells
                    if c in baseline and policy in baseline[c]
                }
                if changes:
                    least = min(changes, key=changes.__getitem__)
                    line += f" | over baseline {geometric_mean(list(changes.values())):.4f}"
                    line += f", worst {changes[least]:.3f} ({least})"
            print(line)


def simulate(arguments: argparse.Namespace) -> None:
    base = Job(
        arguments.drafts,
        "",
        "",
        "",
        0,
        tuple(arguments.policies),
        arguments.num_steps,
        arguments.warm_up,
        arguments.seed,
        arguments.options,
    )
    jobs = [
        replace(base, machine=m, scenario=s, temperature=t, batch_size=b)
        for b in sorted(arguments.batch_sizes, reverse=True)
        for m in arguments.machines
        for s in arguments.scenarios
        for t in arguments.temperatures
    ]
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        results = dict(pool.imap_unordered(simulated, jobs))
    results = {job.cell: results[job.cell] for job in jobs}
    baseline = None
    if arguments.baseline:
        baseline = json.loads(arguments.baseline.read_text())["results"]
    if arguments.output:
        settings = {name: str(value) for name, value in vars(arguments).items() if name != "action"}
        report = {"settings": settings, "results": results}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(results, arguments.policies, baseline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(required=True)
    recording = actions.add_parser("record", help="record drafts of the bundled models")
    recording.add_argument("drafts", type=Path, help="file to write")
    recording.add_argument("--prompts", type=Path, nargs="+", required=True)
    recording.add_argument("--target", default="zoo:target")
    recording.add_argument("--draft", default="zoo:draft")
    recording.add_argument("--companion", default="zoo:companion")
    recording.add_argument("--num-prompts", type=int, default=60, help="of each file")
    recording.add_argument("--max-tokens", type=int, default=96)
    recording.set_defaults(action=record)
    running = actions.add_parser("simulate", help="run policies on recorded drafts")
    running.add_argument("drafts", type=Path, help="file that was recorded")
    running.add_argument("--policies", nargs="+", default=["adaptive", "sv"])
    running.add_argument("--machines", nargs="+", default=list(MACHINES), choices=MACHINES)
    running.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    running.add_argument("--temperatures", nargs="+", default=["0", "1"], choices=["0", "1"])
    running.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    running.add_argument("--num-steps", type=int, default=1000)
    running.add_argument("--warm-up", type=int, default=150, help="steps that are not counted")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--options", default="{}", help="policy options, as JSON")
    running.add_argument("--processes", type=int, default=2)
    running.add_argument("--baseline", type=Path, help="a result to compare with")
    running.add_argument("--output", type=Path)
    running.set_defaults(action=simulate)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
