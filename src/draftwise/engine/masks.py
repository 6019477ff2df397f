"""Which tokens may come next for the rows of a batch.

Those are the tokens by which a text that must have a form goes on, and no token that ends a text
which is to be longer. Both depend on the text and on what is drafted behind it alone, so that
draft, companion and target are masked alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from draftwise.engine.matcher import token_bits
from draftwise.engine.request import Request
from draftwise.models.transfer import upload


def next_masks(
    places: Iterable[tuple[Request, Sequence[int]]], vocab_size: int, device: torch.device
) -> Tensor:
    """The tokens that may come at some places; all of them for a request that is not masked.

    Args:
        places: ``[rows]`` a request, and the tokens drafted behind its text up to the place.
        vocab_size: width of the logits; what is beyond the tokenizer's tokens never may come.
        device: where the logits are.

    Returns:
        ``[rows, vocab]`` float32, 0 for the tokens that may come and −∞ for the others.
    """
    listed = list(places)
    bits = np.full((len(listed), -(-vocab_size // 8)), 255, dtype=np.uint8)
    for row, (request, drafted) in zip(bits, listed, strict=True):
        if request.matcher is not None:
            allowed = request.matcher.allowed(drafted)[: len(row)]
            row[: len(allowed)] = allowed
            row[len(allowed) :] = 0
        if request.must_go_on(len(drafted)):
            others = row & ~token_bits(request.stop_token_ids, len(row))
            # A form that leaves nothing but its end is complete, however short the text is.
            if others.any():
                row[:] = others
    # Bytes travel, and each is looked up where it arrives: faster than to take bits apart.
    packed = upload(torch.from_numpy(bits), torch.uint8, device).int().flatten()
    return _bytes(device).index_select(0, packed).view(len(listed), -1)[:, :vocab_size]


def masks_along(
    requests: Sequence[Request],
    drafted: Sequence[Sequence[int]],
    counts: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> Tensor | None:
    """The tokens that may come along drafts, request after request.

    Args:
        requests: ``[batch]``.
        drafted: ``[batch]`` tokens of each.
        counts: ``[batch]`` places of each, from the one behind its text on.
        vocab_size: width of the logits.
        device: where the logits are.

    Returns:
        ``[sum of counts, vocab]`` float32 as of :func:`next_masks`; ``None`` if no request is
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


@lru_cache
def _bytes(device: torch.device) -> Tensor:
    """``[256, 8]`` the masks that the bits of each byte stand for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits > 0, 0.0, -np.inf).astype(np.float32)).to(device)
