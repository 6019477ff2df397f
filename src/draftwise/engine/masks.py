"""Masks of the tokens that may come next for each row of a batch.

A grammar restricts the next token, and ``min_tokens`` forbids tokens that end the text too early.
Both depend only on the text and on the tokens drafted after it. So the draft, the companion and the
target use the same masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from draftwise.engine.matcher import token_bits
from draftwise.engine.request import Request
from draftwise.models.memory import upload


def next_masks(
    places: Iterable[tuple[Request, Sequence[int]]], vocab_size: int, device: torch.device
) -> Tensor:
    """Masks of the allowed tokens at the given positions. Unmasked requests allow all tokens.

    Args:
        places: ``[rows]`` pairs of a request and the tokens drafted after its text, up to the
            position.
        vocab_size: width of the logits. A grammar never allows entries beyond the tokenizer's
            vocabulary.
        device: device of the logits.

    Returns:
        ``[rows, vocab]`` float32, 0 for allowed tokens and −∞ for the others.
    """
    listed = list(places)
    bits = np.full((len(listed), -(-vocab_size // 8)), 255, dtype=np.uint8)
    for row, (request, drafted) in zip(bits, listed, strict=True):
        if request.matcher is not None:
            allowed = request.matcher.allowed(drafted)[: len(row)]
            row[: len(allowed)] = allowed
            row[len(allowed) :] = 0
        if request.must_continue(len(drafted)):
            others = row & ~token_bits(request.stop_token_ids, len(row))
            # If the grammar allows only the end of the text, the text may end before min_tokens.
            if others.any():
                row[:] = others
    # Packed bytes are copied to the device and expanded there with a lookup table. This is faster
    # than unpacking bits.
    packed = upload(torch.from_numpy(bits), torch.uint8, device).int().flatten()
    return _bytes(device).index_select(0, packed).view(len(listed), -1)[:, :vocab_size]


def masks_along(
    requests: Sequence[Request],
    drafted: Sequence[Sequence[int]],
    counts: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> Tensor | None:
    """Masks of the allowed tokens along each request's draft.

    Args:
        requests: ``[batch]`` requests.
        drafted: ``[batch]`` drafted tokens of each request.
        counts: ``[batch]`` number of positions per request, starting after its text.
        vocab_size: width of the logits.
        device: device of the logits.

    Returns:
        ``[sum of counts, vocab]`` float32 as in :func:`next_masks`; ``None`` if no request is
        masked.
    """
    if not any(request.is_masked for request in requests):
        return None
    places = (
        (request, tokens[:place])
        for request, tokens, count in zip(requests, drafted, counts, strict=True)
        for place in range(count)
    )
    return next_masks(places, vocab_size, device)


def allowed_prefix(request: Request, tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The longest prefix of the tokens in which each token is allowed.

    Args:
        request: the request that the tokens continue.
        tokens: the proposed tokens.
        vocab_size: the target's vocabulary size.
    """
    kept: list[int] = []
    matcher = request.matcher
    for token in tokens:
        if not 0 <= token < vocab_size:
            break
        if request.must_continue(len(kept)) and token in request.stop_token_ids:
            break
        if matcher is not None:
            bits = matcher.allowed(kept)
            if token // 8 >= len(bits) or not bits[token // 8] >> (token % 8) & 1:
                break
        kept.append(token)
        if matcher is not None and matcher.is_end(kept):
            break
    return kept


@lru_cache
def _bytes(device: torch.device) -> Tensor:
    """``[256, 8]`` lookup table from a byte to the masks of its bits."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits > 0, 0.0, -np.inf).astype(np.float32)).to(device)
