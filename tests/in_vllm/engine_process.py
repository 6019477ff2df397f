"""A process that runs vLLM engines. For each line of JSON that it reads, it writes one.

Each engine runs in a fork of its own, because a vLLM engine cannot be shut down reliably within a
process. vLLM, whose import takes most of the time of a short run, is imported once before.

The input has ``engine`` (arguments of ``vllm.LLM``), ``prompts`` (token ids) and ``params`` (of
``SamplingParams``), and optionally ``rule`` (the name of a policy below) and ``costs`` (assumed
cost of a token in the target's pass, in place of measured ones).

The argument of the process is the version of vLLM's model runner. The second one is written in
Triton. Without a GPU its kernels are interpreted, slowly but with the same results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the drafter can be inspected
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(sys.argv[1]) - 1)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

if sys.argv[1] == "2":
    import interpreted_triton

    interpreted_triton.enable()

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from draftwise.benchmark.peer_engines.vllm_repair import repair
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Plan
from draftwise.integrations.vllm import worker
from draftwise.policies.base import DraftPlan, Policy, Signal
from draftwise.policies.step_times import StepTimes

ENGINE_SECONDS = 3000  # only ends a test that hangs


class ByAgreement(Policy):
    """Drops all tokens from the first that the companion would not draw. Not lossless."""

    name = "by-agreement"
    summary = source = "for a test"
    signals = frozenset({Signal.AGREEMENT, Signal.OVERLAP})
    needs_companion = True

    def select(self, draft, companion_scores):
        if companion_scores is None:  # nothing was drafted
            return super().select(draft, companion_scores)
        keeps = self.keeps(companion_scores)
        drafted = torch.arange(draft.tokens.shape[1]) < torch.tensor(draft.lengths).unsqueeze(1)
        lengths = (keeps & drafted).cumprod(dim=1).sum(dim=1)
        return Plan(draft.tokens, tuple(lengths.tolist()), draft.probs)

    def keeps(self, companion_scores):
        return companion_scores.agreement >= 0.9


class ByOverlap(ByAgreement):
    """Decides by overlap, which is known before the token is drawn. Lossless."""

    name = "by-overlap"

    def keeps(self, companion_scores):
        return companion_scores.overlap >= 0.3


class BothSources(Policy):
    """Copies for every other request that has a continuation; the others use the draft model.

    Drafts of the model stop after one to four tokens.
    """

    name = "both-sources"
    summary = source = "for a test"

    def keep_drafting(self, position):
        return torch.tensor([position.index < request % 4 for request in position.requests])

    def plan_drafts(self, requests):
        copies = [bool(r.offer) and r.request_id % 2 == 0 for r in requests]
        return DraftPlan([self.num_speculative_tokens] * len(requests), copies)


RULES = {rule.name: rule for rule in (ByAgreement, ByOverlap, BothSources)}


class FixedCosts(LatencyModel):
    """Constant costs."""

    def observe_target(self, *_):
        pass

    observe_draft = observe_companion = observe_target

    def restart(self, *costs):
        if not hasattr(self, "target"):
            super().restart(*costs)


def fix_costs(per_token: float) -> None:
    """Set the cost of a token in the target's pass, relative to a pass over one token."""
    target = StageCost((1.0, 256.0), (1.0, 1.0 + 255 * per_token))
    small = StageCost((1.0, 256.0), (0.01, 0.011))
    worker._latency = lambda settings: FixedCosts(target, small, small)

    def count(times: StepTimes, *_: object) -> None:
        times.num_steps += 1

    StepTimes.observe = count  # type: ignore[method-assign]


def run(wanted: dict[str, Any]) -> dict[str, Any]:
    if "costs" in wanted:
        fix_costs(wanted["costs"])
    repair()
    if sys.argv[1] == "2":
        interpreted_triton.add_logarithm()
    llm = LLM(**wanted["engine"])
    seen: dict[str, Any] = {"overlaps": [], "drafted": 0, "sent": 0, "asked": 0, "steps": 0}
    seen |= {"accepted": 0, "preempted": 0, "texts": 0, "wrong_texts": 0}
    seen["copied"] = 0
    if "worker_cls" in wanted["engine"]:
        watch(llm, seen, wanted.get("rule"))
    params = SamplingParams(detokenize=False, ignore_eos=True, **wanted["params"])
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in wanted["prompts"]]
    answers = llm.generate(prompts, params, use_tqdm=False)
    overlaps = seen.pop("overlaps")
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "smallest_overlap": min(overlaps, default=None),
        **seen,
    }


def watch(llm: Any, seen: dict[str, Any], rule: str | None) -> None:
    """Count what the proposer does, and optionally replace its policy."""
    core = llm.llm_engine.engine_core.engine_core
    drafter = core.model_executor.driver_worker.worker.drafter
    hooks = drafter.hooks
    steering = hooks.steering
    if rule is not None:
        steering.policy = RULES[rule](worker.PolicyContext(drafter.num_speculative_tokens))
    begin, finish, end = steering.begin, steering.finish, steering.end_step

    def check_and_begin(views, read_texts):
        def read_and_compare():
            texts = read_texts()
            compare_texts(views, texts, core.scheduler, seen)
            return texts

        return begin(views, read_and_compare)

    def finish_and_count(*args):
        decided = finish(*args)
        step = steering.pending
        seen["steps"] += 1
        seen["drafted"] += sum(step.num_drafted)
        seen["sent"] += sum(step.lengths)
        seen["asked"] += step.scored
        seen["copied"] += sum(decided[row] for row in steering.copies)
        return decided

    def end_and_count(*args):
        result = end(*args)
        if result is not None:
            seen["accepted"] += sum(result.num_accepted)
        return result

    steering.begin, steering.finish = check_and_begin, finish_and_count
    steering.end_step = end_and_count
    count_preemptions(core.scheduler, seen)
    score = hooks._companion_scores

    def score_and_record(draft, *step):
        companion_scores = score(draft, *step)
        drafted = draft.signals.token_probs > 0
        seen["overlaps"] += companion_scores.overlap[drafted].tolist()
        return companion_scores

    hooks._companion_scores = score_and_record


def count_preemptions(scheduler: Any, seen: dict[str, Any]) -> None:
    """Count requests that lose their place in the batch."""
    preempt = scheduler._preempt_request

    def preempt_and_count(*args, **kwargs):
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = preempt_and_count


def compare_texts(views: Any, texts: Any, scheduler: Any, seen: dict[str, Any]) -> None:
    """Compare texts with those that the scheduler knows.

    The scheduler does not know yet what the requests gained in this step.
    """
    for view, row in zip(views, texts.rows.tolist(), strict=True):
        if view.room:
            known = list(scheduler.requests[view.name].all_token_ids)
            text = texts.tokens[row, : view.num_tokens].tolist()
            seen["texts"] += 1
            seen["wrong_texts"] += len(text) <= len(known) or text[: len(known)] != known


def run_in_fork(line: str) -> str:
    """Run an engine in a fork of this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(ENGINE_SECONDS)  # ends this process
        try:
            said = run(json.loads(line))
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        with open(writes, "w") as answer:
            json.dump(said, answer)
        os._exit(0)
    os.close(writes)
    with open(reads) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    return said or json.dumps({"error": f"the engine's process ended with status {status}"})


if __name__ == "__main__":
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints
    for line in sys.stdin:
        print(run_in_fork(line), file=replies, flush=True)
    os._exit(0)
