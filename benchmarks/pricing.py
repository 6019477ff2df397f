"""Simulated goodput of policies that price drafts, on recorded drafts.

    python benchmarks/pricing.py record drafts.npz --prompts gsm8k_test.jsonl humaneval.jsonl
    python benchmarks/pricing.py simulate drafts.npz --output pricing.json

``record`` runs plain speculative decoding with the bundled models. For every drafted token it
records the signals and the acceptance probability. ``simulate`` runs the policies themselves on
these drafts. A policy gets the signals of one token at a time. After each step it gets the
acceptance of the tokens that it selected for verification. The simulation runs no model and reads
no clock. The duration of a step comes from a modelled machine, so the load of this machine has no
effect, and no policy is charged for its arithmetic.

A run is compared with two others on the same drafts: with no speculation, and with the static draft
length that is the best in hindsight. Goodput is expected tokens per modelled second, in all steps,
in the first 100, and after ``--warm-up`` steps. The worst beginning is the lowest goodput of the
first n steps relative to no speculation, for any n of at least 100. The scenarios are:

- ``steady``: step times vary by 5 %, one step in 100 takes three times as long.
- ``ragged``: passes in which requests have different numbers of tokens take 10 % longer.
- ``pace``: the whole machine is 1.5 times as slow for 110 steps out of 220.
- ``wrong``: a token in the target's pass costs twice as much as the latency profile says.
- ``cheap``: a token in the target's pass costs 0.4 times what the latency profile says.
- ``dear``: passes of the draft model take three times as long as the profile says.
- ``tiles``: passes take as long as the next multiple of 16 tokens, which no profile contains.
- ``change``: the workload changes in the middle, from the first prompt file to the last.
- ``bad``: tokens are accepted with 0.15 of the recorded probability.
- ``drop``: as ``bad`` in the second half.
- ``load``: every 40 steps there is another number of requests, up to the batch size.

On the machine ``gpu``, every new size of a pass takes 50 ms to prepare. The passes for the draft
lengths from which ``adaptive`` chooses are prepared before the first step.
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
from draftwise.benchmark.report import write_report
from draftwise.benchmark.style import COLOURS
from draftwise.benchmark.workload import chat_prompts
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import CompanionScores, Draft, DraftSignals, Outcome, StepTimes
from draftwise.policies import DraftPosition, PolicyContext, RequestState, create_policy
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.price import LENGTHS
from draftwise.policies.router import PolicyRouter
from draftwise.profiling.acceptance import collect

Floats = NDArray[np.float64]

LONGEST = 7
SIZES = (1, 2, 4, 8, 16, 32)  # of batches
CONTEXT = 200
SIGNALS = ("token_prob", "entropy", "history", "overlap", "agreement", "acceptance")
SCENARIOS = (
    *(
        "steady",
        "ragged",
        "pace",
        "wrong",
        "cheap",
        "dear",
        "tiles",
        "change",
        "bad",
        "drop",
        "load",
    ),
)
WORSE, DEARER = 0.15, 3.0  # the acceptance in `bad`, and the draft's passes in `dear`
FIRST = 100  # steps of a beginning


@dataclass(frozen=True)
class Machine:
    """What passes take, in seconds.

    Attributes:
        target: by the tokens of a pass.
        draft: by the requests that draft.
        companion: by the drafted tokens that it scores.
        signals: looking at the signals of a step's drafts, and for each request.
        preparing: preparing a pass of a new size.
    """

    target: StageCost
    draft: StageCost
    companion: StageCost
    signals: tuple[float, float]
    preparing: float = 0.0


def milliseconds(points: dict[float, float]) -> StageCost:
    return StageCost(tuple(map(float, points)), tuple(ms / 1000 for ms in points.values()))


# The first two after the measured steps of goodput_gsm8k and goodput_no_matrix_unit in
# benchmarks/results; an accelerator is flat up to a knee and launches many small kernels
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

MACHINES["gpu"] = replace(MACHINES["flat"], preparing=0.05)


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
        if self.name == "cheap":
            seconds -= 0.6 * (seconds - self.machine.target(len(lengths)))
        if self.name == "ragged" and len(set(lengths)) > 1:
            seconds *= 1.1
        return seconds

    def draft_seconds(self, counts: Sequence[int]) -> float:
        """The draft's passes, for so many requests each."""
        seconds = sum(map(self.machine.draft, counts))
        return DEARER * seconds if self.name == "dear" else seconds

    def batch_size(self, step: int, most: int) -> int:
        """Number of requests in a step."""
        if self.name != "load":
            return most
        sizes = [size for size in SIZES if size <= most]
        return int(np.random.default_rng([7, step // 40]).choice(sizes))

    def acceptance(self, recorded: Floats, step: int, num_steps: int, greedy: bool) -> Floats:
        """``[batch, length]`` acceptance probabilities in a step."""
        worse = self.name == "bad" or (self.name == "drop" and step >= num_steps // 2)
        if not worse:
            return recorded
        # Greedy tokens are accepted or not.
        random = np.random.default_rng([11, step]).random(recorded.shape)
        return recorded * (random < WORSE) if greedy else recorded * WORSE

    def pace(self, step: int) -> float:
        """How much slower everything is in a step."""
        return 1.5 if self.name == "pace" and step % 220 >= 110 else 1.0


class Run:
    """What the steps of a run gained and took, beside no speculation.

    Attributes:
        gained: ``[steps]`` seconds that no speculation takes for the tokens of each step.
        seconds: ``[steps]`` seconds of each step.
    """

    def __init__(self, gained: Sequence[float], seconds: Sequence[float]) -> None:
        self.gained, self.seconds = np.array(gained), np.array(seconds)

    def goodput(self, first: int = 0, last: int | None = None) -> float:
        """Relative to no speculation."""
        return float(self.gained[first:last].sum() / self.seconds[first:last].sum())

    def worst_beginning(self) -> float:
        """The lowest goodput of the first n steps."""
        return float((self.gained.cumsum() / self.seconds.cumsum())[FIRST - 1 :].min())

    def largest_loss(self) -> float:
        """The most that any number of first steps lost, in steps of no speculation."""
        lost = (self.seconds - self.gained).cumsum() / self.seconds.mean()
        return float(max(0.0, lost.max()))


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
        self._most, self._greedy, self._num_steps = batch_size, greedy, num_steps
        self._random = np.random.default_rng(seed)
        # Counts of accepted tokens, of which some policies learn, are drawn.
        self._drawing = np.random.default_rng(seed + 1)
        self._prepared = self._prepared_at_load()

    @staticmethod
    def _prepared_at_load() -> set[tuple[str, int]]:
        """Sizes of passes in which every request drafts one of the usual lengths."""
        lengths = (0, *(length for length in LENGTHS if length < LONGEST), LONGEST)
        targets = {("target", size * (1 + length)) for size in SIZES for length in lengths}
        return targets | {("draft", size) for size in SIZES}

    def _steps(self) -> Iterator[dict[str, Floats]]:
        """The drafts of each step; every request goes on in its own text."""
        scenario, changes = self._scenario, self._scenario.name == "change"
        starts = self._random.random(self._most)
        for step in range(self._num_steps):
            late = changes and step >= self._num_steps // 2
            drafts = self._drafts[-1 if late else 0]
            rows = ((starts * len(drafts)).astype(np.int64) + step) % len(drafts)
            rows = rows[: scenario.batch_size(step, self._most)]
            columns = {name: column[rows] for name, column in drafts.columns.items()}
            columns["acceptance"] = scenario.acceptance(
                columns["acceptance"], step, self._num_steps, self._greedy
            )
            yield columns

    def _alone(self, step: int, size: int) -> float:
        """Seconds of a step without drafts, all passes being prepared."""
        return self._scenario.target_seconds([0] * size) * self._scenario.pace(step)

    def static(self) -> list[Run]:
        """The fixed draft lengths from 0 on."""
        scenario = self._scenario
        gained: list[list[float]] = [[] for _ in range(LONGEST + 1)]
        seconds: list[list[float]] = [[] for _ in range(LONGEST + 1)]
        prepared = [self._prepared_at_load() for _ in range(LONGEST + 1)]
        for step, drafts in enumerate(self._steps()):
            kept = drafts["acceptance"].cumprod(axis=1).sum(axis=0)
            size = len(drafts["acceptance"])
            tokens = size + np.concatenate([[0.0], np.cumsum(kept)])
            for length in range(LONGEST + 1):
                work = scenario.draft_seconds([size] * length)
                work += scenario.target_seconds([length] * size)
                self._prepared = prepared[length]
                work = work * scenario.pace(step)
                work += self._preparing([length] * size, [size] * length)
                seconds[length].append(work)
                gained[length].append(tokens[length] / size * self._alone(step, size))
        return [Run(*each) for each in zip(gained, seconds, strict=True)]

    def _preparing(self, lengths: Sequence[int], counts: Sequence[int]) -> float:
        """Seconds of preparing the passes of a step that have new sizes."""
        sizes = {("target", len(lengths) + sum(lengths))} | {("draft", count) for count in counts}
        new = sizes - self._prepared
        self._prepared |= new
        return self._scenario.machine.preparing * len(new)

    def run(self, policy: Policy, latency: LatencyModel) -> tuple[Run, dict[str, float]]:
        """What a policy does: its steps, and means for each request."""
        totals = dict.fromkeys(("drafted", "verified", "scored"), 0.0)
        gained, seconds = [], []
        for step, drafts in enumerate(self._steps()):
            size = len(drafts["acceptance"])
            done = self._step(step, policy, latency, drafts)
            gained.append(done["tokens"] / size * self._alone(step, size))
            seconds.append(done["seconds"])
            for name in totals:
                totals[name] += done[name] / size / self._num_steps
        return Run(gained, seconds), totals

    def _step(
        self, step: int, policy: Policy, latency: LatencyModel, drafts: dict[str, Floats]
    ) -> dict[str, float]:
        machine = self._scenario.machine
        history = drafts["history"][:, 0].tolist()
        size = len(history)
        states = [
            RequestState(CONTEXT, 20, LONGEST, number, self._greedy, mean)
            for number, mean in enumerate(history)
        ]
        limits, _, wants_scores = planned_drafts(policy, states)
        watched = policy.uses_draft_signals
        lengths, counts = self._draft(policy, limits, watched, drafts)
        draft = self._written(drafts, lengths, watched)
        scores = None
        if watched and any(lengths) and wants_scores:
            scores = self._scored(drafts, draft)
        plan = policy.select(draft, scores)
        chance = math.exp(0.05 * self._random.standard_normal())
        chance *= 3.0 if self._random.random() < 0.01 else 1.0
        pace = self._scenario.pace(step) * chance
        fixed, each = machine.signals
        draft_seconds = pace * self._scenario.draft_seconds(counts)
        looking = pace * (fixed + each * size) if watched and any(lengths) else 0.0
        scoring = pace * machine.companion(sum(lengths)) if scores is not None else 0.0
        verify = pace * self._scenario.target_seconds(plan.lengths)
        preparing = self._preparing(plan.lengths, counts)
        times = StepTimes(
            draft_seconds,
            scoring,
            looking,
            verify + preparing,
            0.0,
            0.0,
            disturbed=preparing > 0,
            prepared=preparing > 0,
        )
        if not preparing:
            self._learn_costs(latency, times, draft, counts, plan.lengths)
        width = max(lengths, default=0)
        inside = np.arange(width) < np.array(plan.lengths)[:, None]
        acceptance = drafts["acceptance"][:, :width] * inside
        kept = acceptance.cumprod(axis=1)
        drawn = self._drawing.random(acceptance.shape) < acceptance
        policy.observe(
            Outcome(
                tuple(lengths),
                tuple(plan.lengths),
                tuple(drawn.cumprod(axis=1).sum(axis=1).tolist()),
                (0,) * size,
                torch.from_numpy(acceptance).float(),
                frozenset(),
                torch.from_numpy(kept).float(),
            ),
            times,
        )
        # The expectation of what is gained, over the time without what is chance.
        return {
            "tokens": size + float(kept.sum()),
            "seconds": (times.total - preparing) / chance + preparing,
            "drafted": float(sum(lengths)),
            "verified": float(sum(plan.lengths)),
            "scored": size * float(scores is not None),
        }

    def _draft(
        self, policy: Policy, limits: Sequence[int], watched: bool, drafts: dict[str, Floats]
    ) -> tuple[list[int], list[int]]:
        """How many tokens each request drafts, and how many requests draft at each position."""
        lengths, counts = [0] * len(limits), []
        active = [row for row, limit in enumerate(limits) if limit > 0]
        asks = policy.may_stop_drafting
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
        tokens = torch.zeros(len(lengths), width, dtype=torch.long)
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
    unguarded: bool

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

    warm_up = job.warm_up
    static = simulation().static()
    best = max(static, key=lambda run: run.goodput(warm_up))
    result: dict[str, Any] = {"best_static": static.index(best), "over_none": best.goodput(warm_up)}
    runs = {f"fixed {length}": (static[length], {}) for length in (3, 5, 7)}
    for name in job.policies:
        latency = LatencyModel(machine.target, machine.draft, machine.companion)
        context = PolicyContext(
            LONGEST, latency, None, has_companion=True, guarded=not job.unguarded
        )
        policy = PolicyRouter(context, create_policy(name, context, json.loads(job.options)))
        runs[name] = simulation().run(policy, latency)
    for name, (run, means) in runs.items():
        result[name] = {
            "over_best_static": run.goodput(warm_up) / best.goodput(warm_up),
            "all_over_best_static": run.goodput() / max(each.goodput() for each in static),
            "first_over_best_static": run.goodput(0, FIRST) / best.goodput(0, FIRST),
            "all_over_none": run.goodput(),
            "worst_beginning": run.worst_beginning(),
            "largest_loss": run.largest_loss(),
            **means,
        }
    return job.cell, result


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


COLUMNS = {
    "over_best_static": "after warm-up / best static",
    "first_over_best_static": "first 100",
    "all_over_best_static": "all",
    "all_over_none": "all / none",
    "worst_beginning": "worst beginning / none",
}


def show(results: dict[str, Any], policies: Sequence[str], baseline: dict[str, Any] | None) -> None:
    """Geometric means and lowest cells: by scenario, of the machine ``gpu``, and of all others."""
    groups: dict[str, list[str]] = {}
    for cell in results:
        machine, scenario = cell.split()[:2]
        names = ("gpu",) if machine == "gpu" else (scenario, "all others")
        for name in (*names, "all"):
            groups.setdefault(name, []).append(cell)
    print(f"{'policy':15} {'cells':16} " + "  ".join(COLUMNS.values()))
    for policy in policies:
        for group, cells in groups.items():
            line = f"{policy:15} {group:10} {len(cells):4}"
            for column, title in COLUMNS.items():
                values = [results[cell][policy][column] for cell in cells]
                text = f"{geometric_mean(values):.3f} {min(values):.3f}"
                line += f"  {text:>{max(len(title), 11)}}"
            if baseline is not None:
                both = [cell for cell in cells if policy in baseline.get(cell, {})]
                if both:
                    ratios = [
                        results[cell][policy]["all_over_none"]
                        / baseline[cell][policy]["all_over_none"]
                        for cell in both
                    ]
                    line += f"  over baseline {geometric_mean(ratios):.4f} {min(ratios):.3f}"
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
        arguments.unguarded,
    )
    jobs = [
        replace(base, machine=m, scenario=s, temperature=t, batch_size=b)
        for b in sorted(arguments.batch_sizes, reverse=True)
        for m in arguments.machines
        for s in arguments.scenarios
        for t in arguments.temperatures
        # Neighbouring batch sizes differ little, and with one batch size there is no other load.
        if (s == "steady" or b not in (2, 8)) and (s != "load" or b == max(arguments.batch_sizes))
    ]
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        results = dict(pool.imap_unordered(simulated, jobs))
    results = {job.cell: results[job.cell] for job in jobs}
    baseline = None
    if arguments.baseline:
        baseline = json.loads(arguments.baseline.read_text())["results"]
    if arguments.output:
        settings = {name: value for name, value in vars(arguments).items() if name != "action"}
        write_report(arguments.output, settings, {"results": results})
    show(results, arguments.policies, baseline)


def draw(arguments: argparse.Namespace) -> None:
    """Goodput of every cell by scenario, beside the best static length and no speculation."""
    from matplotlib.figure import Figure

    rows = map(json.loads, arguments.summary.read_text(encoding="utf-8").splitlines())
    cells = [row for row in rows if row["run"] == arguments.run and "cell" in row]
    panels = {
        "over_best_static": "after 150 steps / best static length",
        "worst_beginning": "worst beginning / no speculation",
    }
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(2, sharex=True), panels.items(), strict=True):
        for shift, (policy, colour) in enumerate(zip(arguments.policies, COLOURS, strict=False)):
            for place, scenario in enumerate(SCENARIOS):
                of_scenario = [
                    row for row in cells if scenario in row["cell"].rpartition("/")[2].split()
                ]
                own = [row[policy][column] for row in of_scenario]
                at = place + 0.22 * (shift - (len(arguments.policies) - 1) / 2)
                label = policy if place == 0 else None
                axes.plot([at] * len(own), own, ".", color=colour, alpha=0.5, label=label)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_ylabel(title)
        axes.set_ylim(0.4, 1.3)
        axes.set_xticks(range(len(SCENARIOS)), SCENARIOS)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].legend(frameon=False, ncols=len(arguments.policies), loc="upper left")
    figure.savefig(arguments.figure, dpi=150)


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
    running.add_argument("--policies", nargs="+", default=["adaptive", "sv", "smartspec"])
    running.add_argument("--machines", nargs="+", default=list(MACHINES), choices=MACHINES)
    running.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    running.add_argument("--temperatures", nargs="+", default=["0", "1"], choices=["0", "1"])
    running.add_argument("--batch-sizes", type=int, nargs="+", default=list(SIZES))
    running.add_argument("--num-steps", type=int, default=700)
    running.add_argument("--warm-up", type=int, default=150, help="steps of learning")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--unguarded", action="store_true", help="run policies without guard")
    running.add_argument("--options", default="{}", help="policy options, as JSON")
    running.add_argument("--processes", type=int, default=2)
    running.add_argument("--baseline", type=Path, help="a result to compare with")
    running.add_argument("--output", type=Path)
    running.set_defaults(action=simulate)
    drawing = actions.add_parser("draw", help="draw the result of a simulation")
    drawing.add_argument("summary", type=Path, help="results/summary.jsonl, or that of a run")
    drawing.add_argument("figure", type=Path, help="file to write")
    drawing.add_argument("--run", default="price", help="name of the run")
    drawing.add_argument("--policies", nargs="+", default=["fixed 5", "smartspec", "adaptive"])
    drawing.set_defaults(action=draw)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
