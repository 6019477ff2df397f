"""Reusable buffers that drafts are written to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.core.random import StageUniforms
from draftwise.core.types import Draft, DraftSignals
from draftwise.models.memory import upload


class _Distributions:
    """Distributions of drafted tokens, of which only those that were written before are cleared.

    With a vocabulary of 262,144 tokens, a distribution has 1 MB.

    Attributes:
        numbers: ``[requests, columns, vocab]`` float32.
        written: for each request, the number of leading columns that may not be 0.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self.numbers = torch.zeros(shape, device=device)
        self.written = [0] * shape[0]

    def distrust(self) -> None:
        """Take all columns for written, after a draft that did not end."""
        self.written = [self.numbers.shape[1]] * len(self.written)

    def cleared(self, lengths: Sequence[int], columns: int, written: Sequence[int]) -> Tensor:
        """``[batch, columns, vocab]``, a view with zeros beyond each request's length.

        Args:
            lengths: ``[batch]`` drafted tokens of each request.
            columns: columns of the view.
            written: ``[batch]`` leading columns of each request that this draft wrote.
        """
        view = self.numbers[: len(lengths), :columns]
        if view.device.type != "cpu":
            clear_beyond(lengths, view)
            return view
        array = view.numpy()
        for request, length in enumerate(lengths):
            end = max(self.written[request], written[request])
            array[request, length:end] = 0
            self.written[request] = end if end > columns else length
        return view


class DraftBuffers:
    """Buffers for the draft of one step. The next draft overwrites them.

    Attributes:
        num_requests: maximum number of requests.
        width: maximum number of tokens per request.
        vocab_size: width of the distributions.
        device: device of the buffers.
        tokens: ``[requests, width]`` int64.
        entropy, token_probs: ``[requests, width]`` float32, as in :class:`DraftSignals`.
        is_nan: ``[requests, width]`` uint8, 1 where the draft's logits were NaN.
    """

    def __init__(
        self, num_requests: int, width: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.num_requests, self.width, self.vocab_size = num_requests, width, vocab_size
        self.device = torch.device(device)
        self.tokens = torch.zeros(num_requests, width, dtype=torch.long, device=device)
        self.entropy = torch.zeros(num_requests, width, device=device)
        self.token_probs = torch.zeros(num_requests, width, device=device)
        self.is_nan = torch.zeros(num_requests, width, dtype=torch.uint8, device=device)
        self._probs: _Distributions | None = None
        self._draft_probs: _Distributions | None = None

    @property
    def probs(self) -> Tensor:
        """``[requests, width + 1, vocab]`` float32 q, allocated at first use."""
        return self._all_probs.numbers

    @property
    def draft_probs(self) -> Tensor:
        """``[requests, width, vocab]`` float32, allocated at first use.

        The draft's own distributions, used where they differ from q.
        """
        return self._all_draft_probs.numbers

    @property
    def _all_probs(self) -> _Distributions:
        if self._probs is None:
            shape = self.num_requests, self.width + 1, self.vocab_size
            self._probs = _Distributions(shape, self.device)
        return self._probs

    @property
    def _all_draft_probs(self) -> _Distributions:
        if self._draft_probs is None:
            shape = self.num_requests, self.width, self.vocab_size
            self._draft_probs = _Distributions(shape, self.device)
        return self._draft_probs

    def distrust(self) -> None:
        """Clear more in the next draft, because the last one did not end."""
        for each in (self._probs, self._draft_probs):
            if each is not None:
                each.distrust()

    def fits(self, num_requests: int, width: int) -> bool:
        """Whether the buffers are large enough for a draft."""
        return num_requests <= self.num_requests and width <= self.width

    def draft(
        self,
        lengths: Sequence[int],
        num_tokens: int,
        stage_uniforms: StageUniforms | None,
        sampled: bool,
        signals: bool,
        own_draft_probs: bool,
        written: Sequence[int] | None = None,
    ) -> Draft:
        """The draft in the buffers, with zeros beyond each request's length.

        Args:
            lengths: ``[batch]`` drafted tokens of each request.
            num_tokens: columns of the draft.
            stage_uniforms: random numbers of the step.
            sampled: whether q was written.
            signals: whether the signals were written.
            own_draft_probs: whether :attr:`draft_probs` was written; otherwise q is used instead.
            written: ``[batch]`` leading columns of each request's distributions that may have been
                written; ``None`` for all of them.

        Returns:
            A draft whose distributions are views of the buffers.
        """
        count = len(lengths)
        tokens = self.tokens[:count, :num_tokens].clone()
        per_token = [tokens]
        if written is None:
            written = [num_tokens + 1] * count
        probs = known = None
        if sampled:
            probs = self._all_probs.cleared(lengths, num_tokens + 1, written)
        if signals:
            if own_draft_probs or probs is None:
                wide = self._all_draft_probs.cleared(lengths, num_tokens, written)
            else:
                wide = probs[:, :num_tokens]
            known = DraftSignals(
                wide,
                self.entropy[:count, :num_tokens].clone(),
                self.token_probs[:count, :num_tokens].clone(),
            )
            per_token += [known.entropy, known.token_probs]
        clear_beyond(lengths, *per_token)
        return Draft(tokens, tuple(lengths), probs, known, stage_uniforms)

    def put(self, indices: Sequence[int], draft: Draft, own_draft_probs: bool) -> None:
        """Write the draft of some requests, copied from any device.

        Args:
            indices: indices of the requests in the batch.
            draft: the draft of these requests.
            own_draft_probs: whether the signals' distributions differ from q.
        """
        at, width = list(indices), draft.tokens.shape[1]
        self.tokens[at, :width] = draft.tokens.to(self.device)
        if draft.probs is not None:
            self.probs[at, :width] = draft.probs[:, :width].to(self.device)
        if draft.signals is not None:
            self.entropy[at, :width] = draft.signals.entropy.to(self.device)
            self.token_probs[at, :width] = draft.signals.token_probs.to(self.device)
            if own_draft_probs:
                self.draft_probs[at, :width] = draft.signals.draft_probs.to(self.device)


def clear_beyond(lengths: Sequence[int], *buffers: Tensor) -> None:
    """Set all elements beyond each request's length to 0, in place.

    Args:
        lengths: ``[batch]`` drafted tokens of each request.
        buffers: tensors ``[batch, columns, …]``.
    """
    for values in buffers:
        columns = values.shape[1]
        if columns <= min(lengths, default=columns):
            continue
        if values.device.type == "cpu":
            array = values.numpy()
            for request, length in enumerate(lengths):
                if length < columns:
                    array[request, length:] = 0
            continue
        extents = upload(list(lengths), torch.long, values.device).unsqueeze(1)
        beyond = torch.arange(columns, device=values.device) >= extents
        values.masked_fill_(beyond.view(*beyond.shape, *[1] * (values.dim() - 2)), 0)
