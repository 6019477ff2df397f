"""Selection of the pass shapes to measure."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.profiling.passes import PassShape, Stage

Shapes = dict[Stage, list[PassShape]]

# Quick measurement: few sizes, denser where passes change from memory-bound to compute-bound.
_QUICK_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_QUICK_CONTEXTS = (64, 512)
_QUICK_REQUESTS = 8
# Maximum total context of a pass, which limits memory and time. The cost of context depends only on
# its sum over the requests.
_MAX_TOTAL_CONTEXT = 16384
# Time grows in steps where kernels process rows in blocks. From this batch size on, batches are
# measured at every quarter of a drafted token per request, up to two tokens.
_LARGE_BATCH = 8


def quick_shapes(
    stages: Sequence[Stage], max_requests: int, num_speculative_tokens: int, max_context: int
) -> Shapes:
    """A few shapes up to the largest pass of the engine.

    Args:
        stages: stages to measure.
        max_requests: largest batch.
        num_speculative_tokens: maximum number of tokens drafted per request, at least 1.
        max_context: longest context.
    """
    per_request = num_speculative_tokens + 1
    long = min(_QUICK_CONTEXTS[1], max_context)
    short = min(_QUICK_CONTEXTS[0], max(1, long // 4))
    middle = (short + long) // 2

    def requests_of(num_tokens: int) -> int:
        """Batch size at which ``num_tokens`` verifies about half of the maximum draft length."""
        most = min(max_requests, num_tokens)
        return max(1, -(-num_tokens // per_request), min(most, 2 * num_tokens // per_request))

    tokens = _up_to(max_requests * per_request)
    target = [PassShape(requests_of(n), n, short) for n in tokens]
    batch = min(_QUICK_REQUESTS, max_requests)
    target += [
        PassShape(batch, n, long) for n in tokens if batch <= n <= min(2, per_request) * batch
    ]
    scored = _up_to(max_requests * num_speculative_tokens)
    companion = [PassShape(-(-n // num_speculative_tokens), n, middle) for n in scored]
    batches = [n for n in _powers_up_to(max_requests) if n in (1, 2, 4, 8, 32) or n > 32]
    draft = [PassShape(n, n, middle) for n in sorted({*batches, max_requests})]
    every = {Stage.TARGET: target, Stage.DRAFT: draft, Stage.COMPANION: companion}
    return {stage: every[stage] for stage in stages}


def thorough_shapes(
    stages: Sequence[Stage],
    max_requests: int,
    num_speculative_tokens: int,
    contexts: Sequence[int],
) -> Shapes:
    """Every combination of batch size, tokens per request and context.

    For large batches, also passes in which only some of the requests verify one more token, at the
    shortest context.

    Args:
        stages: stages to measure.
        max_requests: largest batch.
        num_speculative_tokens: maximum number of tokens drafted per request, at least 1.
        contexts: contexts of the target. Draft and companion are measured at the middle one,
            reduced if it does not fit.
    """
    batches = _powers_up_to(max_requests)
    target = [
        PassShape(n, n * (verified + 1), context)
        for n in batches
        for verified in _some(num_speculative_tokens)
        for context in contexts
        if n * context <= _MAX_TOTAL_CONTEXT or n == 1
    ]
    whole, shortest = {shape.num_tokens for shape in target}, min(contexts)
    partly = {
        n * quarters // 4: n
        for n in batches
        for quarters in range(4, 4 * min(3, num_speculative_tokens + 1))
        if n >= _LARGE_BATCH and n * shortest <= _MAX_TOTAL_CONTEXT
    }
    target += [
        PassShape(n, tokens, shortest) for tokens, n in partly.items() if tokens not in whole
    ]
    middle = sorted(contexts)[len(contexts) // 2]
    fitting = min(middle, max(1, _MAX_TOTAL_CONTEXT // max_requests))
    companion = [
        PassShape(n, n * scored, fitting)
        for n in batches
        for scored in _some(num_speculative_tokens)
        if scored
    ]
    draft = [PassShape(n, n, fitting) for n in batches]
    every = {Stage.TARGET: target, Stage.DRAFT: draft, Stage.COMPANION: companion}
    return {stage: every[stage] for stage in stages}


def _up_to(most: int) -> list[int]:
    sizes = [n for n in _QUICK_TOKENS if n < most]
    while sizes and sizes[-1] * 2 < most and sizes[-1] >= _QUICK_TOKENS[-1]:
        sizes.append(sizes[-1] * 2)
    return [*sizes, most]


def _powers_up_to(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)})


def _some(most: int) -> list[int]:
    """Numbers in 0 … ``most``: all small ones and some large ones."""
    return sorted({n for n in (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50) if n < most} | {most})
