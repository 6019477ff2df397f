"""Copies of texts that another engine stores on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.integrations.vllm.paged_cache import Integers, Spans, pack
from draftwise.integrations.vllm.steps import RequestView
from draftwise.integrations.vllm.text_drafts import Texts

# Token ids ``[tokens]`` by the engine's row and the position of each token, on the host.
TokensAt = Callable[[Integers, Integers], NDArray[np.int32]]


def device_tokens(stored: Tensor) -> TokensAt:
    """Reads tokens that are on a device.

    Args:
        stored: ``[rows, length]`` the engine's tokens.
    """

    def tokens_at(rows: Integers, positions: Integers) -> NDArray[np.int32]:
        places = torch.from_numpy(np.stack([rows, positions])).to(stored.device)
        tokens: NDArray[np.int32] = stored[places[0], places[1]].cpu().numpy()
        return tokens

    return tokens_at


class TextCopies:
    """Host copies of the texts of generating requests. Each step copies the new tokens only.

    A request that leaves the batch is forgotten, and its whole text is copied when it comes back.
    In steps without a call, a request may leave and another one of the same name and with a prompt
    of the same length may take its row. Its copy is then wrong, which changes drafts only.
    """

    def __init__(self, num_rows: int, max_length: int) -> None:
        """Allocate memory.

        Args:
            num_rows: number of rows in which the engine stores texts.
            max_length: maximum length of a text, in tokens.
        """
        self._tokens = np.zeros((num_rows, max_length), dtype=np.int32)
        self._lengths = np.zeros(num_rows, dtype=np.int64)
        # The request of each row, as its name and the length of its prompt.
        self._owners: dict[int, tuple[str, int]] = {}

    def update(self, views: Sequence[RequestView], rows: Integers, tokens_at: TokensAt) -> Texts:
        """Copy the new tokens of all requests that can draft.

        Args:
            views: the requests of the step.
            rows: ``[batch]`` the engine's row of each request.
            tokens_at: reads tokens.
        """
        owners = {}
        for view, row in zip(views, rows.tolist(), strict=True):
            if view.room > 0:
                owner = owners[row] = view.name, view.num_tokens - view.num_output_tokens
                # A request gains at least one token before it drafts again. Otherwise this is
                # another request of the same name.
                is_known = self._owners.get(row) == owner
                if not is_known or self._lengths[row] >= view.num_tokens:
                    self._lengths[row] = 0
        self._owners = owners
        drafting = np.array([view.room > 0 for view in views], dtype=bool)
        if drafting.any():
            lengths = np.array([view.num_tokens for view in views], dtype=np.int64)[drafting]
            used = rows[drafting]
            packed = pack(Spans(used, self._lengths[used], lengths))
            new = tokens_at(packed.owners, packed.positions)
            self._tokens[packed.owners, packed.positions] = new
            self._lengths[used] = lengths
        return Texts(self._tokens, rows)
