"""A drafted position whose beliefs are fetched only if somebody asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.policies.base import DraftPosition


class LatePosition(DraftPosition):
    """A position whose numbers are on the host already; the beliefs follow when asked for."""

    def __init__(
        self,
        index: int,
        requests: Sequence[int],
        tokens: Tensor,
        entropy: Tensor | None,
        token_probs: Tensor | None,
        beliefs: Tensor | None,
        agreement: Tensor | None = None,
    ) -> None:
        """Set up.

        Args:
            index: position in the draft.
            requests: ``[active]`` requests.
            tokens: ``[active]`` int64.
            entropy: ``[active]`` float32; ``None`` without signals, like the two that follow.
            token_probs: ``[active]`` float32.
            beliefs: ``[requests, vocab]`` of all requests, wherever they are.
            agreement: ``[active]`` float32, of who is judged by the target.
        """
        values = {
            "index": index,
            "requests": requests,
            "tokens": tokens,
            "entropy": entropy,
            "token_probs": token_probs,
            "agreement": agreement,
            "_beliefs": beliefs,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def judged(self, agreement: Tensor) -> LatePosition:
        """See :class:`DraftPosition`."""
        known = vars(self)
        return LatePosition(
            self.index,
            self.requests,
            self.tokens,
            self.entropy,
            self.token_probs,
            known["_beliefs"],
            agreement,
        )

    @property
    def beliefs(self) -> Tensor | None:
        """``[active, vocab]`` float32 on the host."""
        everyone: Tensor | None = vars(self)["_beliefs"]
        return None if everyone is None else everyone.cpu()[list(self.requests)]
