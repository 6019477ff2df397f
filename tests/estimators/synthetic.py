"""Synthetic records whose acceptance follows a known law."""

import numpy as np

from draftwise.estimators.records import Records


def records_of(overlap, agreement, acceptance, seed=0, chain_length=1):
    """Records with given signals and acceptance probabilities, in chains of one length.

    Whether a token is accepted is sampled. All tokens after the first rejection are rejected.
    """
    random = np.random.default_rng(seed)
    size = len(overlap)
    position = np.arange(size) % chain_length
    drawn = random.random(size) < acceptance
    accepted = drawn.copy()
    for index in range(1, size):
        if position[index]:
            accepted[index] &= accepted[index - 1]
    noise = random.random((4, size)).astype(np.float32)
    return Records(
        chain=np.arange(size) // chain_length,
        position=position,
        entropy=noise[0],
        token_prob=noise[1],
        top_prob=noise[2],
        overlap=np.asarray(overlap, dtype=np.float32),
        agreement=np.asarray(agreement, dtype=np.float32),
        confidence=np.zeros(size, dtype=np.float32),
        history=noise[3],
        acceptance=np.asarray(acceptance, dtype=np.float32),
        accepted=accepted,
    )


def smooth_law(overlap, agreement):
    """P(accept | S, A), which increases in both."""
    return 0.05 + 0.3 * overlap + 0.6 * agreement**2


def smooth_records(size, seed=0, chain_length=1):
    """Records with many large S and A, and with some A exactly 0 or 1, as with real models."""
    random = np.random.default_rng(seed)
    overlap = random.beta(4, 2, size).astype(np.float32)
    agreement = random.beta(1, 1, size).astype(np.float32)
    agreement[random.random(size) < overlap / 2] = 1
    agreement[random.random(size) < 0.1] = 0
    law = smooth_law(overlap, agreement)
    happened = np.clip(law + random.uniform(-0.05, 0.05, size), 0, 1)
    return records_of(overlap, agreement, happened, seed, chain_length)
