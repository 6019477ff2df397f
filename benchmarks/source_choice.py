"""Goodput of suffix drafts, a draft model, both together, and an oracle, on recorded texts.

    python benchmarks/source_choice.py record texts.npz --prompts gsm8k_test.jsonl humaneval.jsonl
    python benchmarks/source_choice.py replay texts.npz --output source_choice.json

``record`` lets the target answer prompts. For every token x of an answer it stores the probability
min(1, q(x)/p(x)) that a token of the draft model was accepted there, if the answer has x at this
place. It also measures the times of the passes. ``replay`` runs ``adaptive`` on these texts, with
the real search for continuations. The draft model and the target are replaced by the recorded
probabilities and times, so the load of the machine has no effect. Each batch is always full.

The result is goodput relative to no speculation, by workload, temperature and batch size, with:

- ``suffix``, ``model`` and ``hybrid``: ``adaptive`` with these drafts.
- ``oracle``: knows which tokens of a continuation are right, and the probabilities of the draft
  model. In each step it uses the better source for each request, and drafts and verifies what
  increases goodput most.
- ``continued``: the same oracle, which may also continue a continuation with the draft model at the
  first wrong token, and the draft model's tokens with another continuation.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recorded_texts import add_recording_options, cost_arrays, read_texts, text_key

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import load_workload
from draftwise.core.latency import LatencyModel
from draftwise.core.sampling import probabilities
from draftwise.core.signals import entropy
from draftwise.core.types import Draft, DraftSignals, Outcome, StepTimes
from draftwise.engine.assembly import Models
from draftwise.engine.batch import Batch, batch_controls
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers import create_proposer
from draftwise.engine.proposers.base import Proposer, ProposerContext
from draftwise.engine.proposers.hybrid import HybridProposer
from draftwise.engine.request import Request
from draftwise.engine.suffix.matcher import SuffixMatcher
from draftwise.models.attention import Segment
from draftwise.policies import PolicyContext, create_policy
from draftwise.policies.base import Policy
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.router import PolicyRouter
from draftwise.profiling.latency import measure_latency
from draftwise.speculation import RequestSpeculation

Floats = NDArray[np.float64]
CONTEXT = 4096
ARMS = ("suffix", "model", "hybrid", "oracle", "continued")
# Prices of a row of the target's pass that the oracle tries, relative to the mean over the pass.
ROW_PRICES = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Text:
    """A recorded answer.

    Attributes:
        prompt: its prompt.
        output: its tokens.
        acceptance: ``[output]`` probability that the draft model's token was accepted.
        entropy: ``[output]`` entropy of the draft model's distribution.
        right, wrong: ``[output]`` the draft model's probability of the token, and of another one
            that it drew and that was rejected.
    """

    prompt: list[int]
    output: list[int]
    acceptance: Floats
    entropy: Floats
    right: Floats
    wrong: Floats


def params_of(temperature: float, **settings: Any) -> SamplingParams:
    top_p = 0.95 if temperature else 1.0
    return SamplingParams(temperature=temperature, top_p=top_p, ignore_eos=True, **settings)


@torch.inference_mode()
def record(arguments: argparse.Namespace) -> None:
    """Write texts, acceptance and times of passes to a file."""
    llm = LLM(arguments.target, dtype=arguments.dtype, max_batch_size=16, max_model_len=2048)
    models = llm.load_models(SpeculationConfig(arguments.draft, policy="fixed"))
    latency = measure_latency(models, 32, num_speculative_tokens=8)
    arrays = cost_arrays(latency)
    for path in arguments.prompts:
        workload = load_workload(llm, path, arguments.num_prompts, arguments.longest_prompt, True)
        for temperature in (0.0, 0.8):
            params = [
                params_of(temperature, max_tokens=arguments.max_tokens, seed=seed)
                for seed in range(len(workload.prompts))
            ]
            outputs = llm.generate(workload.prompts, params)
            kept = []
            for index, (prompt, output) in enumerate(zip(workload.prompts, outputs, strict=True)):
                text = recorded(models, prompt, output.token_ids, params[index])
                for field, values in vars(text).items():
                    arrays[text_key(path.stem, temperature, index, field)] = values
                kept.append(text.acceptance.mean())
            print(path.stem, temperature, len(kept), f"acceptance {np.mean(kept):.2f}", flush=True)
    np.savez_compressed(arguments.texts, **arrays)


def recorded(models: Models, prompt: list[int], output: list[int], params: SamplingParams) -> Text:
    """An answer, with the acceptance of the draft model's tokens and their signals."""
    tokens, device = [*prompt, *output[:-1]], torch.device("cpu")
    x, found = torch.tensor(output)[:, None], []
    own = params if params.temperature else replace(params, temperature=1.0)
    assert models.draft is not None
    for loaded, each in ((models.target, params), (models.draft, params), (models.draft, own)):
        cache = loaded.model.new_cache(1, len(tokens))
        rows = range(len(prompt) - 1, len(tokens))
        logits = loaded.model.forward(cache, tokens, [Segment(0, 0, len(tokens))], rows)
        assert logits is not None
        controls = batch_controls([each] * len(output), logits.shape[1], device)
        found.append(probabilities(logits.float(), controls, None))
    p, q, own_q = found
    # Rounding may change the target's most likely token, so p may be 0.
    accepted = (q.gather(1, x) / p.gather(1, x).clamp(min=1e-9)).clamp(max=1.0)
    rejected = (q - p.scatter(1, x, 1.0)).clamp(min=0) + 1e-12 * q.scatter(1, x, 0.0) + 1e-30
    other = torch.multinomial(rejected, 1, generator=torch.Generator().manual_seed(0))
    columns = accepted, entropy(own_q)[:, None], own_q.gather(1, x), own_q.gather(1, other)
    return Text(prompt, output, *(each.squeeze(1).double().numpy() for each in columns))


class RecordedModel:
    """Takes the place of the draft model: its tokens are right with the recorded probabilities."""

    state_layers: tuple[int, ...] = ()

    def __init__(self, texts: dict[int, Text]) -> None:
        self.texts = texts
        self.read: dict[int, int] = {}
        self._random = np.random.default_rng(0)
        self._drafted: set[int] = set()

    def room(self, request: Request) -> int:
        return CONTEXT - len(request.tokens)

    def must_read(self, batch: Batch) -> bool:
        return False

    def num_behind(self, request: Request) -> int:
        return len(request.tokens) - 1 - self.read[request.request_id]

    def draft(
        self, batch: Batch, policy: Policy, limits: Sequence[int], min_width: int = 0
    ) -> Draft:
        width = max(*limits, min_width)
        tokens = torch.zeros(len(limits), width, dtype=torch.long)
        entropies, probs = torch.zeros(2, len(limits), width)
        for row, (request, limit) in enumerate(zip(batch.generating, limits, strict=True)):
            text, start = self.texts[request.request_id], request.num_output_tokens
            for place in range(limit):
                at = start + place
                right = self._random.random() < text.acceptance[at]
                tokens[row, place] = text.output[at] + int(not right)
                entropies[row, place] = text.entropy[at]
                probs[row, place] = (text.right if right else text.wrong)[at]
        signals = None
        if policy.uses_draft_signals():
            # Without thresholds, nothing reads the distributions.
            signals = DraftSignals(torch.zeros(0), entropies, probs)
            for at in range(max(limits)):
                active = [row for row, limit in enumerate(limits) if limit > at]
                of_active = (each[active, at] for each in (tokens, entropies, probs))
                drawn, own_entropies, own_probs = of_active
                # It estimates the acceptance of each token. Without thresholds, it stops no draft.
                policy.keep_drafting(
                    DraftPosition(at, active, drawn, None, own_entropies, own_probs)
                )
        self._drafted = {r.request_id for r, n in zip(batch.generating, limits, strict=True) if n}
        return Draft(tokens, tuple(limits), None, signals)

    def admit(self, request: Request) -> None:
        self.read[request.request_id] = len(request.tokens) - 1

    def commit(self, commit: Commit) -> None:
        for request in commit.requests:
            if request.request_id in self._drafted:
                self.read[request.request_id] = len(request.tokens) - 1
        self._drafted = set()

    def retire(self, request: Request) -> None:
        pass


class ModelAlone(Proposer):
    """Drafts with the recorded model only."""

    name = "recorded"
    summary = "recorded"

    def __init__(self, context: ProposerContext, model: RecordedModel) -> None:
        super().__init__(context)
        self._model = model
        self.admit, self.commit, self.retire = model.admit, model.commit, model.retire  # type: ignore[method-assign]

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        lengths = self.draft_limits(batch, policy)
        return self._model.draft(batch, policy, lengths)


class Replay:
    """A batch of recorded texts that is always full.

    Attributes:
        tokens, seconds: gained tokens and modelled time so far.
    """

    def __init__(
        self, texts: Sequence[Text], latency: LatencyModel, batch_size: int, gamma: int
    ) -> None:
        self.latency, self.gamma = latency, gamma
        self.tokens = self.seconds = 0.0
        self.by_id: dict[int, Text] = {}
        self.per_token = (latency.draft_seconds(32) - latency.draft_seconds(1)) / 31
        self._waiting: Iterator[Text] = itertools.cycle(texts)
        self.running: list[Request] = []
        self._ids = itertools.count()
        self._batch_size = batch_size

    def fill(self, temperature: float) -> list[Request]:
        """Replace the requests that ended; returns the new ones."""
        slots = set(range(self._batch_size)) - {request.cache_slot for request in self.running}
        new = []
        for slot in sorted(slots):
            text = next(self._waiting)
            params = params_of(temperature, max_tokens=len(text.output))
            speculation, none = RequestSpeculation(), frozenset[int]()
            request = Request(
                next(self._ids), None, text.prompt, params, None, none, CONTEXT, speculation
            )
            request.tokens.append(text.output[0])  # from the step that read the prompt
            request.cache_slot = slot
            self.by_id[request.request_id] = text
            new.append(request)
        self.running = sorted([*self.running, *new], key=lambda request: request.cache_slot)
        return new

    def remaining(self, request: Request) -> list[int]:
        """The recorded tokens that follow."""
        return self.by_id[request.request_id].output[request.num_output_tokens :]

    def step_seconds(self, drafted: Sequence[int], verified: int, behind: int) -> float:
        """Of a step with draft lengths of the model, verified tokens, and tokens it reads first."""
        context = sum(len(request.tokens) for request in self.running)
        seconds = self.latency.target_seconds(len(self.running) + verified, context)
        depths = range(max(drafted, default=0))
        seconds += self.latency.drafting_seconds(
            [sum(length > depth for length in drafted) for depth in depths]
        )
        return seconds + self.per_token * behind

    def gain(self, accepted: Sequence[int], seconds: float) -> None:
        """Append tokens to the running requests, and remove those that end."""
        for request, count in zip(self.running, accepted, strict=True):
            new = self.remaining(request)[: count + 1]
            request.tokens += new
            self.tokens += len(new)
        self.seconds += seconds
        self.running = [request for request in self.running if self.remaining(request)]


def replay_policy(
    replay: Replay, arm: str, temperature: float, num_tokens: int, learning_steps: int
) -> float:
    """Goodput of ``adaptive``, after steps that are not counted."""
    context = PolicyContext(replay.gamma, replay.latency)
    policy = PolicyRouter(context, create_policy("adaptive", context, {"num_thresholds": 0}))
    host = ProposerContext(1 << 30, torch.device("cpu"), replay._batch_size, CONTEXT)
    model = RecordedModel(replay.by_id)
    offers = create_proposer("suffix", host)
    proposer: Proposer = offers
    if arm == "hybrid":
        proposer = HybridProposer(host, offers, model)  # type: ignore[arg-type]
    elif arm == "model":
        proposer = ModelAlone(host, model)
    start, step = (0.0, 0.0), 0
    while step <= learning_steps or replay.tokens < start[0] + num_tokens:
        step += 1
        if step <= learning_steps:
            start = replay.tokens, replay.seconds
        for request in replay.fill(temperature):
            proposer.admit(request)
        requests = list(replay.running)
        size = len(requests)
        controls = batch_controls([r.params for r in requests], 8, host.device)
        batch = Batch([], requests, [True] * size, controls, None, None, [1.0] * size, [0.0] * size)
        behind = [0 if arm == "suffix" else model.num_behind(r) for r in requests]
        draft = proposer.propose(batch, policy)
        plan = policy.select(draft, None)
        is_one_hot = draft.is_one_hot or (False,) * size
        accepted, known = [], np.zeros((size, plan.tokens.shape[1]))
        for row, (request, drafted, n) in enumerate(
            zip(requests, plan.host_tokens, plan.lengths, strict=True)
        ):
            right = [a == b for a, b in zip(drafted[:n], replay.remaining(request), strict=False)]
            accepted.append(right.index(False) if False in right else n)
            first = request.num_output_tokens
            by_model = replay.by_id[request.request_id].acceptance[first : first + n]
            known[row, :n] = right if is_one_hot[row] else by_model
        of_model = [0 if copy else n for n, copy in zip(draft.lengths, is_one_hot, strict=True)]
        lag = sum(each for each, n in zip(behind, of_model, strict=True) if n)
        seconds = replay.step_seconds(of_model, sum(plan.lengths), lag)
        acceptance = torch.from_numpy(known)
        outcome = Outcome(
            draft.lengths,
            plan.lengths,
            tuple(accepted),
            (0,) * size,
            acceptance,
            prefix_acceptance_prob=acceptance.cumprod(1),
            is_one_hot=draft.is_one_hot,
        )
        policy.observe(outcome, StepTimes(0, 0, 0, seconds, 0, 0))
        starts = [len(request.tokens) for request in requests]
        for row, request in enumerate(requests):
            if not is_one_hot[row]:
                request.history.learn(known[row, : plan.lengths[row]].tolist())
        replay.gain(accepted, seconds)
        commit = Commit(requests, starts, [0] * size, [None] * size)
        proposer.commit(commit)
    return (replay.tokens - start[0]) / (replay.seconds - start[1])


class Oracle:
    """Chooses the best source of each request, knowing what is accepted."""

    def __init__(self, replay: Replay, continues: bool) -> None:
        self._replay, self._continues = replay, continues
        self._matcher = SuffixMatcher(1, CONTEXT)
        self._found: dict[tuple[int, int], int] = {}
        self._random = np.random.default_rng(0)

    def num_right(self, text: Text, start: int) -> int:
        """Number of right tokens in the continuation of the first tokens of an answer."""
        key = id(text), start
        if key not in self._found:
            self._matcher.begin(0, [*text.prompt, *text.output[:start]])
            found = self._matcher.continuations([0], [self._replay.gamma])
            proposed, count = found.tokens[0, : found.lengths[0]].tolist(), 0
            for token, right in zip(proposed, text.output[start:], strict=False):
                if token != right:
                    break
                count += 1
            self._found[key] = count
        return self._found[key]

    def drafts(self, request: Request) -> list[list[tuple[float, int, int, int]]]:
        """By depth of the model's passes, the possible drafts of a request.

        Each is the expected number of accepted tokens, the number of verified ones, and the number
        of continued tokens before and after those of the model.
        """
        text, start = self._replay.by_id[request.request_id], request.num_output_tokens
        most = min(self._replay.gamma, len(text.output) - start - 1)
        copied = min(self.num_right(text, start), most)
        result = [[(float(copied), copied, copied, 0)]]
        for depth in range(1, most + 1):
            options = []
            for before in {0, copied} if self._continues else {0}:
                if before + depth > most:
                    continue
                first = start + before
                reach = np.cumprod(text.acceptance[first : first + depth])
                expected, after = before + float(reach.sum()), 0
                if self._continues:
                    room = most - before - depth
                    after = min(self.num_right(text, first + depth), room)
                options += [(expected, before + depth, before, 0)]
                options += [(expected + after * reach[-1], before + depth + after, before, after)]
            result.append(options)
        return result

    def step(self, goodput: float, behind: Sequence[int]) -> tuple[list[int], list[bool], float]:
        """``[batch]`` accepted tokens, and whether the model drafted; and the step's seconds."""
        replay = self._replay
        drafts = [self.drafts(request) for request in replay.running]
        mean = replay.latency.target_seconds(len(drafts)) / len(drafts)
        best: tuple[float, Any, Any] = (-math.inf, None, None)
        for price, depth in itertools.product(ROW_PRICES, range(replay.gamma + 1)):
            row_price = price * mean
            chosen = []
            for options, lag in zip(drafts, behind, strict=True):
                usable: list[tuple[float, int, tuple[float, int, int, int]]] = [
                    (0, 0, (0.0, 0, 0, 0))
                ]
                for passes, each in enumerate(options[: depth + 1]):
                    own = replay.per_token * (passes + lag + each[0][2]) if passes and each else 0
                    usable += [
                        (one[0] / goodput - row_price * one[1] - own, passes, one) for one in each
                    ]
                chosen.append(max(usable, key=lambda each: each[0]))
            passes_of = [passes for _, passes, _ in chosen]
            verified = sum(one[1] for _, _, one in chosen)
            lag = sum(b + c[2][2] for b, c in zip(behind, chosen, strict=True) if c[1])
            seconds = replay.step_seconds(passes_of, verified, lag)
            net = sum(one[0] for _, _, one in chosen) / goodput - seconds
            if net > best[0]:
                best = net, chosen, seconds
        accepted = [
            self._accepted(r, c[1], c[2]) for r, c in zip(replay.running, best[1], strict=True)
        ]
        return accepted, [c[1] > 0 for c in best[1]], best[2]

    def _accepted(self, request: Request, passes: int, one: tuple[float, int, int, int]) -> int:
        text, (_, _, before, after) = self._replay.by_id[request.request_id], one
        if not passes:
            return before
        first = request.num_output_tokens + before
        for place in range(passes):
            if self._random.random() >= text.acceptance[first + place]:
                return before + place
        return before + passes + after


def replay_oracle(make: Any, continues: bool, temperature: float, num_tokens: int) -> float:
    """Goodput with the best price of a second, which is the goodput itself."""
    goodput = 0.0
    for _ in range(3):
        replay = make()
        if not goodput:
            goodput = 2 * replay._batch_size / replay.latency.target_seconds(replay._batch_size)
        oracle, model = Oracle(replay, continues), RecordedModel(replay.by_id)
        while replay.tokens < num_tokens:
            for request in replay.fill(temperature):
                model.admit(request)
            requests = list(replay.running)
            behind = [model.num_behind(request) for request in requests]
            accepted, drafted, seconds = oracle.step(goodput, behind)
            replay.gain(accepted, seconds)
            for request, used in zip(requests, drafted, strict=True):
                if used:
                    model.read[request.request_id] = len(request.tokens) - 1
        goodput = replay.tokens / replay.seconds
    return goodput


def replay_all(arguments: argparse.Namespace) -> None:
    """Replay every workload, and print goodput relative to no speculation."""
    costs, recorded_texts = read_texts(arguments.texts)
    if arguments.draft_price != 1.0:
        costs[1] = replace(
            costs[1],
            seconds=tuple(arguments.draft_price * each for each in costs[1].seconds),
            first_extra=arguments.draft_price * costs[1].first_extra,
        )
    cells = []
    for (workload, temperature), answers in recorded_texts.items():
        those = [
            Text(**{k: v.tolist() if k in ("prompt", "output") else v for k, v in each.items()})
            for each in answers
        ]
        num_tokens = sum(len(text.output) for text in those)
        for batch_size in arguments.batch_sizes:

            def make(those: list[Text] = those, batch_size: int = batch_size) -> Replay:
                return Replay(those, LatencyModel(*costs), batch_size, arguments.gamma)

            alone = batch_size / make().latency.target_seconds(batch_size)
            figures = {}
            for arm in ARMS:
                if arm in ("oracle", "continued"):
                    goodput = replay_oracle(make, arm == "continued", temperature, num_tokens)
                else:
                    goodput = replay_policy(
                        make(), arm, temperature, num_tokens, arguments.learning_steps
                    )
                figures[arm] = goodput / alone
            best = max(figures["suffix"], figures["model"])
            cell = {"workload": workload, "temperature": temperature, "batch_size": batch_size}
            cells.append(cell | figures | {"hybrid_over_better": figures["hybrid"] / best})
            print(
                f"{workload:14s} T {temperature} batch {batch_size:3d}  ",
                "  ".join(f"{name} {value:.3f}" for name, value in figures.items()),
                f"  hybrid/better {figures['hybrid'] / best:.3f}",
                f"  continued/oracle {figures['continued'] / figures['oracle']:.3f}",
                flush=True,
            )
    ratios = {
        "hybrid over the better": [cell["hybrid_over_better"] for cell in cells],
        "oracle over hybrid": [cell["oracle"] / cell["hybrid"] for cell in cells],
        "continued over oracle": [cell["continued"] / cell["oracle"] for cell in cells],
    }
    means = {name: float(np.exp(np.mean(np.log(each)))) for name, each in ratios.items()}
    print(means, f"lowest hybrid over the better {min(ratios['hybrid over the better']):.3f}")
    if arguments.output:
        report = {"cells": cells, "geometric_means": means}
        write_report(arguments.output, vars(arguments), report)


def main() -> None:
    """Record or replay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    add_recording_options(recording, num_prompts=24, longest_prompt=1500, max_tokens=128)
    recording.set_defaults(run=record)
    replaying = commands.add_parser("replay")
    replaying.add_argument("texts", type=Path)
    replaying.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    replaying.add_argument("--gamma", type=int, default=8)
    replaying.add_argument("--learning-steps", type=int, default=256)
    replaying.add_argument(
        "--draft-price", type=float, default=1.0, help="factor on the times of the draft model"
    )
    replaying.add_argument("--output", type=Path)
    replaying.set_defaults(run=replay_all)
    arguments = parser.parse_args()
    run = arguments.run
    del arguments.run
    run(arguments)


if __name__ == "__main__":
    main()
