"""Runs vLLM in a process of its own: a line of JSON comes in, a line goes out.

An engine of vLLM can hardly be ended within a process. What is asked of it: ``engine`` (arguments
of ``vllm.LLM``), ``prompts`` (token ids), ``params`` (of ``SamplingParams``), and perhaps ``rule``
(the name of a policy below) and ``costs`` (what steps are said to cost, whatever they do).

The argument of the process is the version of vLLM's model runner. The second one is written in
Triton; where there is nothing to compile that for, its kernels are interpreted: slowly, and with
the same results.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib import metadata
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the drafter is looked at
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(sys.argv[1]) - 1)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

if sys.argv[1] == "2":
    import interpreted_triton

    interpreted_triton.switch_on()

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from draftwise.core.latency import LatencyModel, StageCost
from draftwise.core.types import Plan
from draftwise.integrations.vllm import worker
from draftwise.policies.base import Policy, Signal


class ByAgreement(Policy):
    """Sends tokens up to the first that the companion would not draw: looks at what it cuts."""

    name = "by-agreement"
    summary = source = "of a test"
    signals = frozenset({Signal.AGREEMENT, Signal.OVERLAP})
    needs_companion = True

    def draft_lengths(self, requests):
        return [min(self.num_speculative_tokens, request.draft_limit) for request in requests]

    def select(self, draft, judgement):
        if judgement is None:  # nothing was drafted
            return super().select(draft, judgement)
        keeps = self.keeps(judgement)
        drafted = torch.arange(draft.tokens.shape[1]) < torch.tensor(draft.lengths).unsqueeze(1)
        lengths = (keeps & drafted).cumprod(dim=1).sum(dim=1)
        return Plan(draft.tokens, tuple(lengths.tolist()), draft.probs)

    def keeps(self, judgement):
        return judgement.agreement >= 0.9


class ByOverlap(ByAgreement):
    """The same by what is known before the token is drawn."""

    name = "by-overlap"

    def keeps(self, judgement):
        return judgement.overlap >= 0.3


RULES = {rule.name: rule for rule in (ByAgreement, ByOverlap)}


class Said(LatencyModel):
    """Costs that stay as they are said to be."""

    def observe_target(self, *_):
        pass

    observe_draft = observe_companion = observe_target

    def restart(self, *costs):
        if not hasattr(self, "target"):
            super().restart(*costs)


def say_costs(per_token: float) -> None:
    """Let a token in the target's pass cost so much of the pass."""
    target = StageCost((1.0, 256.0), (1.0, 1.0 + 255 * per_token))
    small = StageCost((1.0, 256.0), (0.01, 0.011))
    worker._latency = lambda settings: Said(target, small, small)


def mend_vllm() -> None:
    """vLLM 0.32.0 on a CPU writes sampling parameters of drafted tokens to a copy (vllm#55005).

    Temperature, top-k and top-p of sampled requests are then whatever was in memory, with any
    speculation. Later versions are left alone.
    """
    version = metadata.version("vllm-cpu")
    if version != "0.32.0":
        return
    from vllm.utils import cpu_triton_utils

    def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
        values = torch.where(input_val == replace_from, replace_to, input_val)
        starts = torch.nn.functional.pad(cu_num_tokens, (1, 0))[:-1]
        output.copy_(torch.repeat_interleave(values, (cu_num_tokens - starts).long()))

    cpu_triton_utils._expand_kernel_impl = expand  # is registered when a worker starts


def run(wanted: dict[str, Any]) -> dict[str, Any]:
    if "costs" in wanted:
        say_costs(wanted["costs"])
    mend_vllm()
    if sys.argv[1] == "2":
        interpreted_triton.give_a_logarithm()
    llm = LLM(**wanted["engine"])
    seen: dict[str, Any] = {"overlaps": [], "drafted": 0, "sent": 0, "asked": 0, "steps": 0}
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
    """Count what the proposer does, and let it follow another rule."""
    core = llm.llm_engine.engine_core.engine_core
    drafter = core.model_executor.driver_worker.worker.drafter
    drafting = drafter.drafting
    steering = drafting.steering
    if rule is not None:
        steering.policy = RULES[rule](worker.PolicyContext(drafter.num_speculative_tokens))
    finish, judged = steering.finish, drafting._judged

    def finish_and_count(*args):
        lengths = finish(*args)
        step = steering.sent
        seen["steps"] += 1
        seen["drafted"] += sum(step.num_drafted)
        seen["sent"] += sum(step.lengths)
        seen["asked"] += step.judged
        return lengths

    def judge_and_keep(draft, *step):
        judgement = judged(draft, *step)
        drafted = draft.signals.token_probs > 0
        seen["overlaps"] += judgement.overlap[drafted].tolist()
        return judgement

    steering.finish, drafting._judged = finish_and_count, judge_and_keep


if __name__ == "__main__":
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = run(json.loads(sys.stdin.readline()))
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    replies.write(json.dumps(answer) + "\n")
    replies.flush()
    os._exit(0)
