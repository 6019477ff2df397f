"""Which passes are worth measuring."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.profiling.passes import PassShape, Stage

Shapes = dict[Stage, list[PassShape]]

# Quick: few sizes, denser where a pass of few tokens turns into one whose time grows with each.
_QUICK_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_QUICK_CONTEXTS = (64, 512)
_QUICK_ROWS = 8
# The price of context is the same for many short requests as for a few long ones: no more of it in
# a pass than this, for the sake of memory and time.
_MOST_CONTEXT = 16384
# Time does not grow evenly where kernels take rows together: from here on batches are measured at
# every quarter of a drafted token for each request, up to two.
_LARGE_BATCH = 8


def quick_shapes(
    stages: Sequence[Stage], max_requests: int, num_speculative_tokens: int, max_context: int
) -> Shapes:
    """A few passes up to the largest that the engine may ask for.

    Args:
        stages: those to measure.
        max_requests: largest batch.
        num_speculative_tokens: most tokens drafted per step, at least 1.
        max_context: longest context.
    """
    per_request = num_speculative_tokens + 1
    long = min(_QUICK_CONTEXTS[1], max_context)
    short = min(_QUICK_CONTEXTS[0], max(1, long // 4))
    middle = (short + long) // 2

    def requests_of(num_tokens: int) -> int:
        """A batch that verifies half of what it may."""
        most = min(max_requests, num_tokens)
        return max(1, -(-num_tokens // per_request), min(most, 2 * num_tokens // per_request))

    tokens = _up_to(max_requests * per_request)
    target = [PassShape(requests_of(n), n, short) for n in tokens]
    rows = min(_QUICK_ROWS, max_requests)
    target += [PassShape(rows, n, long) for n in tokens if rows <= n <= min(2, per_request) * rows]
    judged = _up_to(max_requests * num_speculative_tokens)
    companion = [PassShape(-(-n // num_speculative_tokens), n, middle) for n in judged]
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
    """Every batch size with every number of tokens per request and every context.

    Of large batches passes in which only some requests verify a token more, at the shortest one.

    Args:
        stages: those to measure.
        max_requests: largest batch.
        num_speculative_tokens: most tokens drafted per step, at least 1.
        contexts: of the target; the small models are measured at the middle one, or what of it
            fits.
    """
    batches = _powers_up_to(max_requests)
    target = [
        PassShape(n, n * (verified + 1), context)
        for n in batches
        for verified in _some(num_speculative_tokens)
        for context in contexts
        if n * context <= _MOST_CONTEXT or n == 1
    ]
    whole, shortest = {shape.num_tokens for shape in target}, min(contexts)
    partly = {
        n * quarters // 4: n
        for n in batches
        for quarters in range(4, 4 * min(3, num_speculative_tokens + 1))
        if n >= _LARGE_BATCH and n * shortest <= _MOST_CONTEXT
    }
    target += [
        PassShape(n, tokens, shortest) for tokens, n in partly.items() if tokens not in whole
    ]
    middle = sorted(contexts)[len(contexts) // 2]
    fitting = min(middle, max(1, _MOST_CONTEXT // max_requests))
    companion = [
        PassShape(n, n * judged, fitting)
        for n in batches
        for judged in _some(num_speculative_tokens)
        if judged
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
    """0 … most, all of the small numbers and some of the large."""
    return sorted({n for n in (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50) if n < most} | {most})
