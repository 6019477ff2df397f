"""Whole answers, prompts included, in turns: for studies where reading prompts is what matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwise.benchmark.contenders import Contender
from draftwise.benchmark.contest import compete, make_cell, ratios
from draftwise.benchmark.figures import spread
from draftwise.core.types import PARTS
from draftwise.errors import PeerError
from draftwise.params import SamplingParams


def answer_in_turns(
    name: str,
    prompts: Sequence[list[int]],
    contenders: Sequence[Contender],
    params: SamplingParams,
    batch_size: int,
    rounds: int,
) -> dict[str, Any]:
    """By contender: speed against target-only decoding, and where the time went.

    Args:
        name: of the workload.
        prompts: dealt out to rounds.
        contenders: the first one is target-only decoding.
        params: for all prompts.
        batch_size: prompts answered at once.
        rounds: turns of each.

    Raises:
        PeerError: one of them failed; names it.
    """
    cell = make_cell(name, prompts, batch_size, rounds)
    results = compete(cell, contenders, params, learning_turns=1)
    figures = {}
    for each, result in results.items():
        records = result.records
        if result.error is not None or records is None:
            raise PeerError(each, result.error or "took no turn")
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
