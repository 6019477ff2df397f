"""Interleaved runs of whole answers, prefill included, for studies in which prefill matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftwise.benchmark.contenders import Contender
from draftwise.benchmark.contest import compete, make_cell, ratios
from draftwise.benchmark.figures import spread
from draftwise.core.types import PARTS
from draftwise.errors import PeerError
from draftwise.params import SamplingParams


def answer_interleaved(
    name: str,
    prompts: Sequence[list[int]],
    contenders: Sequence[Contender],
    params: SamplingParams,
    batch_size: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure speed relative to target-only decoding, and time by part of a step.

    Args:
        name: name of the workload.
        prompts: prompts, divided between the rounds.
        contenders: contenders, the first of which is target-only decoding.
        params: sampling parameters of all prompts; end-of-sequence tokens are ignored.
        batch_size: prompts answered at once.
        rounds: number of turns of each contender.

    Returns:
        Figures by contender.

    Raises:
        PeerError: a contender failed.
    """
    cell = make_cell(name, prompts, batch_size, rounds)
    results = compete(cell, contenders, replace(params, ignore_eos=True), learning_turns=1)
    figures = {}
    for each, result in results.items():
        records = result.records
        if result.error is not None or records is None:
            raise PeerError(each, result.error or "did not run")
        whole = sum(records.seconds.values())
        figures[each] = {
            "ratio": spread(ratios(results, each)),
            "seconds": whole,
            "prefill_share": 1 - records.decode_seconds / whole,
            "share_of_time": {part: records.seconds[part] / whole for part in PARTS},
            "tokens_per_step": records.num_tokens / max(records.num_request_steps, 1),
            "decode_tokens_per_second": records.decode_tokens / max(records.decode_seconds, 1e-12),
        }
    return figures
