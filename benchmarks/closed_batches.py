"""Time of batches that nobody joins, with drafts from the text, by simulation.

    python benchmarks/closed_batches.py record answers.json --target gemma.gguf --prompts *.jsonl
    python benchmarks/closed_batches.py simulate answers.json --output closed.json

``record`` lets a target answer prompts without speculation, at two temperatures. With a seed,
drafts from the text do not change an answer. So ``simulate`` needs no model: a copied token is
accepted if it is the next token of the recorded answer. The policies, the guard, the search for
continuations and their estimates are those of the engine. Steps take the time of a modelled machine
with 3 % of noise, and one step in 200 takes twice as long. The policies know the machine's times
with errors of 3 %.

A batch is the prompts of one call of ``LLM.generate``. Its time is that until the last answer has
ended. The results are times without speculation over times of a policy, prompts included.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Outcome, StepTimes
from draftwise.engine.suffix.matcher import SuffixMatcher
from draftwise.kernels.native.suffix import FoundContinuations
from draftwise.policies import PolicyContext, RequestState, create_policy
from draftwise.policies.router import PolicyRouter

GAMMA, MAX_TOKENS, NOISE = 7, 96, 0.03
TEMPERATURES = (0.0, 0.8)
# Seconds of steps of Gemma 3 270M without a matrix unit, by the tokens of the pass.
STEP = StageCost(
    (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256),
    (
        *(0.0078, 0.008, 0.0087, 0.0094, 0.0102, 0.0124, 0.0145, 0.0183, 0.023, 0.033, 0.0425),
        *(0.085, 0.17),
    ),
    1.9e-6,
)
# Seconds of a prompt token, of looking for continuations, and of that for each request.
PROMPT, LOOKING, LOOKING_EACH = 0.35e-3, 0.1e-3, 0.03e-3


def record(arguments: argparse.Namespace) -> None:
    """Write the prompts and answers of every workload and temperature, as tokens."""
    from draftwise import LLM, SamplingParams
    from draftwise.benchmark.workload import load_workload

    count = arguments.num_answers
    llm = LLM(arguments.target, max_batch_size=32, enable_prefix_caching=False)
    answers: dict[str, Any] = {}
    for path in arguments.prompts:
        prompts = load_workload(llm, path, 200, 700, False).prompts
        random.Random(0).shuffle(prompts)
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=number)
                for number in range(count)
            ]
            outputs = llm.generate([prompts[n % len(prompts)] for n in range(count)], params)
            answers[f"{path.stem} T={temperature:g}"] = [
                (list(output.prompt_token_ids), list(output.token_ids)) for output in outputs
            ]
            arguments.answers.write_text(json.dumps(answers))
            print(path.stem, temperature, flush=True)


class Answer:
    """An answer that is being generated.

    Attributes:
        tokens: all of its tokens.
        known: number of those that were generated.
    """

    def __init__(self, number: int, prompt: list[int], tokens: list[int]) -> None:
        self.number, self.prompt, self.tokens, self.known = number, prompt, tokens, 1

    @property
    def rest(self) -> list[int]:
        return self.tokens[self.known :]

    def state(self, greedy: bool, offer: Sequence[float] = ()) -> RequestState:
        left = MAX_TOKENS - self.known
        return RequestState(
            len(self.prompt) + self.known,
            self.known,
            min(GAMMA, left - 1),
            self.number,
            greedy,
            offer=offer,
            has_model=False,
            num_left=left,
        )


class Machine:
    """Batches of one workload on a modelled machine, with one policy or none."""

    def __init__(self, policy: str | None, greedy: bool, num_slots: int, seed: int) -> None:
        self._greedy, self._random = greedy, np.random.default_rng(seed)
        self._matcher = SuffixMatcher(num_slots, 2048)
        self._router = None
        if policy is not None:
            errors = np.exp(NOISE * self._random.standard_normal(len(STEP.seconds)))
            seconds = np.maximum.accumulate(np.array(STEP.seconds) * errors)
            profile = StageCost(STEP.tokens, tuple(seconds.tolist()), STEP.per_context_token)
            context = PolicyContext(GAMMA, LatencyModel(profile), guarded=True)
            self._router = PolicyRouter(context, create_policy(policy, context, {}))

    def seconds(self, answers: Sequence[Answer]) -> float:
        """Time until the last answer has ended."""
        taken = PROMPT * sum(len(answer.prompt) for answer in answers)
        live = {}
        for slot, answer in enumerate(answers):
            self._matcher.begin(slot, answer.prompt + answer.tokens[:1], 0, self._greedy)
            if answer.rest:
                live[slot] = answer
        while live:
            taken += self._step(live)
            live = {slot: answer for slot, answer in live.items() if answer.rest}
        return taken

    def _step(self, live: dict[int, Answer]) -> float:
        """Advance all answers; returns the seconds."""
        size = len(live)
        lengths, accepted, looking = [0] * size, [0] * size, 0.0
        if self._router is not None:
            states = [answer.state(self._greedy) for answer in live.values()]
            found = None
            if self._router.looks_for_offers(states):
                looking = LOOKING + LOOKING_EACH * size
                found = self._matcher.continuations(list(live), [s.draft_limit for s in states])
                states = [
                    answer.state(self._greedy, found.acceptance[row, : found.lengths[row]].tolist())
                    for row, answer in enumerate(live.values())
                ]
            lengths = list(self._router.plan_drafts(states).lengths)
            if found is not None:
                accepted = self._accepted(live, found, lengths)
        context = sum(len(answer.prompt) + answer.known for answer in live.values())
        seconds = STEP(size + sum(lengths), context)
        if self._router is not None:
            chance = math.exp(NOISE * self._random.standard_normal())
            chance *= 2.0 if self._random.random() < 0.005 else 1.0
            kept = torch.zeros(size, max(lengths, default=0))
            for row, count in enumerate(accepted):
                kept[row, :count] = 1.0
            drafted, nothing = tuple(lengths), (0,) * size
            outcome = Outcome(
                drafted,
                drafted,
                tuple(accepted),
                nothing,
                kept,
                prefix_acceptance_prob=kept,
                is_copied=(True,) * size,
            )
            times = StepTimes(chance * looking, 0.0, 0.0, chance * seconds, 0.0, 0.0)
            self._router.observe(outcome, times)
        for (slot, answer), count in zip(live.items(), accepted, strict=True):
            self._matcher.extend(slot, answer.rest[: count + 1])
            answer.known += min(count + 1, len(answer.rest))
        return seconds + looking

    def _accepted(
        self, live: dict[int, Answer], found: FoundContinuations, lengths: Sequence[int]
    ) -> list[int]:
        """Accepted tokens of every draft. Learns from what was found."""
        accepted, num_known, num_same = [], [], []
        for row, answer in enumerate(live.values()):
            proposed = found.tokens[row, : found.lengths[row]].tolist()
            pairs = zip(proposed, answer.rest, strict=False)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            same = min(len(proposed), len(answer.rest)) if same is None else same
            accepted.append(min(same, lengths[row]))
            gained = min(accepted[-1] + 1, len(answer.rest), len(proposed))
            num_same.append(min(same, gained))
            num_known.append(min(gained, num_same[-1] + 1))
        self._matcher.learn(found, num_known, num_same)
        return accepted


def simulate(arguments: argparse.Namespace) -> None:
    """Print and write the ratios of all policies, workloads and batch sizes."""
    from draftwise.benchmark.report import write_report

    recorded, rows = json.loads(arguments.answers.read_text()), []
    for workload, answers in recorded.items():
        greedy = workload.endswith("T=0")
        for size in arguments.batch_sizes:
            alone = batches_of(answers, size, None, greedy, 0)
            for policy in arguments.policies:
                runs = [batches_of(answers, size, policy, greedy, seed) for seed in (1, 2)]
                ratio = statistics.mean(sum(alone) / sum(run) for run in runs)
                rows.append({"at": f"{workload} b={size}", "contender": policy, "ratio": ratio})
                print(f"{workload} b={size} {policy}: {ratio:.3f}", flush=True)
    for policy in arguments.policies:
        ratios = [row["ratio"] for row in rows if row["contender"] == policy]
        mean = statistics.geometric_mean(ratios)
        print(f"{policy}: geometric mean {mean:.3f}, lowest {min(ratios):.3f}")
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": rows})


def batches_of(
    answers: Sequence[Any], size: int, policy: str | None, greedy: bool, seed: int
) -> list[float]:
    """Seconds of the batches of a workload; at batch size 1, of its first eight answers."""
    torch.set_num_threads(1)
    machine = Machine(policy, greedy, size, seed)
    last = len(answers) if size > 1 else 8
    return [
        machine.seconds([Answer(number, *answers[number]) for number in range(first, first + size)])
        for first in range(0, last - size + 1, size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("answers", type=Path)
    recording.add_argument("--target", required=True)
    recording.add_argument("--prompts", type=Path, nargs="+", required=True)
    recording.add_argument("--num-answers", type=int, default=64)
    recording.set_defaults(run=record)
    simulating = commands.add_parser("simulate")
    simulating.add_argument("answers", type=Path)
    simulating.add_argument("--policies", nargs="+", default=["adaptive", "fixed"])
    simulating.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    simulating.add_argument("--output", type=Path)
    simulating.set_defaults(run=simulate)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
