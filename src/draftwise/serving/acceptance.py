"""Acceptance of the drafts of one request, in the form of vLLM's responses."""

from __future__ import annotations

from typing import Any

from draftwise.serving.messages import DraftSteps

# Values of vLLM's option `--per-request-spec-decode-metrics`.
NONE, SUMMARY, DETAILED = LEVELS = ("none", "summary", "detailed")


def acceptance_metrics(drafts: DraftSteps, level: str) -> dict[str, Any]:
    """The object ``metrics.speculative_decoding`` of a response.

    Steps without a draft do not count, as in vLLM. Drafted tokens that the policy drops before
    they are verified do not count either.

    Args:
        drafts: counts of each draft.
        level: ``summary``, or ``detailed`` for the counts of every step too.
    """
    num_steps, num_accepted = len(drafts.accepted), sum(drafts.accepted)
    num_verified = sum(drafts.verified)
    histogram = [0] * (max([drafts.max_tokens, *drafts.accepted]) + 1)
    for count in drafts.accepted:
        histogram[count] += 1
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + (num_accepted / num_steps if num_steps else 0.0),
        "draft_acceptance_rate": num_accepted / num_verified if num_verified else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_verified,
        "num_spec_tokens": drafts.max_tokens,
    }
    if level == DETAILED:
        metrics |= {"per_step_accepted": drafts.accepted, "per_step_drafted": drafts.verified}
    return metrics
