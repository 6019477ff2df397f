"""Summary of speculative decoding in a run, as text and as JSON-serialisable data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.core.draft_length import advised_draft_length
from draftwise.llm import LLM
from draftwise.outputs import SpeculationStats
from draftwise.speculation import MAX_SPECULATIVE_TOKENS, SpeculationConfig


def settings(speculation: SpeculationConfig) -> dict[str, str]:
    """The policy, and settings that differ from their defaults, by name."""
    name = speculation.policy_name
    default_note = ""
    if speculation.policy is None:
        with_or_without = "without" if speculation.companion is None else "with"
        default_note = f" (the default {with_or_without} a companion)"
    options = "".join(f", {key} {value}" for key, value in speculation.policy_options.items())
    lines = {"policy": f"{name}{default_note}, at most {speculation.num_speculative_tokens} tokens"}
    lines["policy"] += options
    if _smallest_lenience(speculation) < 1:
        lines["lenience"] = _lenience_in_words(speculation.lenience)
    return lines


def findings(llm: LLM, stats: SpeculationStats) -> dict[str, str]:
    """Measurements of the policy's decisions, by name."""
    speculation = llm.speculation
    if speculation is None or speculation.policy_name == "none" or not stats.num_steps:
        return {}
    if speculation.policy_name == "fixed":
        if not stats.num_drafted or speculation.tree_width > 1:
            return {}
        return {"advice": _advice(stats, speculation.num_speculative_tokens)}
    drafted, verified, accepted = (
        count / stats.num_steps
        for count in (stats.num_drafted, stats.num_verified, stats.num_accepted)
    )
    lines = {
        "per step": f"drafted {drafted:.2f}, verified {verified:.2f}, accepted {accepted:.2f} "
        "tokens for each request"
    }
    if llm.companion is not None and stats.num_drafted:
        share = stats.num_scored / stats.num_drafted
        lines["companion"] = f"scored {share:.0%} of the drafted tokens"
    balance = llm.engine.guard_balance
    if balance is not None:
        lines["guard"] = f"later drafts may cost {max(balance, 0.0):.1f} steps"
    return lines


def losslessness(llm: LLM, stats: SpeculationStats) -> str:
    """State whether the output is lossless, and if not, why."""
    if stats.lossless or llm.speculation is None:
        return "[dim]lossless: the output has exactly the target's distribution[/]"
    if _smallest_lenience(llm.speculation) < 1:
        why = "lenience below 1 accepts tokens that the target would have rejected"
    else:
        name = llm.speculation.policy_name
        why = f"policy {name} changes the distribution of sampled text"
    return f"[bold yellow]not lossless: {why}[/]"


def describe_speculation(llm: LLM, stats: SpeculationStats) -> dict[str, Any]:
    """Settings and measurements as one JSON-serialisable object."""
    speculation = llm.speculation
    if speculation is None:
        return {"policy": "none"}
    lenience, advised = speculation.lenience, None
    is_chain = speculation.tree_width == 1
    if speculation.policy_name == "fixed" and is_chain and stats.num_drafted:
        advised = _advised(stats, speculation.num_speculative_tokens)
    return {
        "policy": speculation.policy_name,
        "policy_was_given": speculation.policy is not None,
        "policy_options": dict(speculation.policy_options),
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "lenience": dict(lenience) if isinstance(lenience, Mapping) else lenience,
        "verification": speculation.verification,
        "profile": speculation.profile,
        "latency_profile": speculation.latency_profile,
        **describe_stats(stats),
        "guard_balance": llm.engine.guard_balance,
        "advised_num_speculative_tokens": advised,
    }


def describe_stats(stats: SpeculationStats) -> dict[str, Any]:
    """Counts of one or several requests as a JSON-serialisable object."""
    return {
        "num_steps": stats.num_steps,
        "num_drafted": stats.num_drafted,
        "num_verified": stats.num_verified,
        "num_accepted": stats.num_accepted,
        "num_scored": stats.num_scored,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
        "seconds_saved": stats.seconds_saved,
        "lossless": stats.lossless,
    }


def _advised(stats: SpeculationStats, num_drafted: int) -> int:
    advised = advised_draft_length(stats.num_accepted / stats.num_steps, num_drafted)
    return min(advised, MAX_SPECULATIVE_TOKENS)


def _advice(stats: SpeculationStats, num_drafted: int) -> str:
    advised = _advised(stats, num_drafted)
    mean_accepted = stats.num_accepted / stats.num_steps
    measured = f"accepted {mean_accepted:.1f} of {num_drafted} drafted tokens per step"
    if advised > num_drafted:
        return f"{measured}: longer drafts may be faster, try {advised}"
    if advised == num_drafted:
        return f"{measured}: {num_drafted} is about right"
    return f"{measured}: about {advised} would do"


def _smallest_lenience(speculation: SpeculationConfig) -> float:
    lenience = speculation.lenience
    return min(lenience.values()) if isinstance(lenience, Mapping) else lenience


def _lenience_in_words(lenience: float | Mapping[int, float]) -> str:
    if not isinstance(lenience, Mapping):
        return f"{lenience:g}"
    first, *rest = sorted(lenience.items())
    others = "".join(f", {value:g} while {least} or more requests wait" for least, value in rest)
    return f"{first[1]:g}{others}"
