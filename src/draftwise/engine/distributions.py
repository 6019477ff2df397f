"""What a companion thinks of a draft: by our own kernels on a CPU that has them."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory, beliefs, control_logits
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.core.types import Draft, Judgement
from draftwise.models.native import sampling as native
from draftwise.models.native.library import native_library
from draftwise.models.transfer import upload


def judgement(
    logits: Tensor,
    controls: LogitControls,
    lengths: list[int],
    history: TokenHistory | None,
    draft: Draft,
) -> Judgement:
    """What a companion thinks of a draft.

    Args:
        logits: ``[sum of lengths, vocab]`` of the companion.
        controls: one entry per request.
        lengths: ``[batch]`` leading tokens of each request's draft that it has judged.
        history: one entry per row; needed if :attr:`LogitControls.uses_history`.
        draft: with its signals.
    """
    assert draft.signals is not None
    q = draft.signals.beliefs
    places = [(request, i) for request, length in enumerate(lengths) for i in range(length)]
    where = upload([n for place in places for n in place], torch.long, logits.device).view(-1, 2)
    library = native_library() if logits.device.type == "cpu" else None
    if library is not None:
        logits = controlled(logits, controls, where[:, 0], history)
        return Judgement(*native.judge(library, logits, controls, where, draft.tokens, q))
    c = torch.zeros_like(q)
    if places:
        owner, position = where.unbind(dim=1)
        believed = beliefs(logits, controls.rows(owner), history)
        c[owner, position] = believed.nan_to_num(nan=0.0)
    c_drawn = token_probabilities(c, draft.tokens)
    return Judgement(c, overlap(q, c), agreement(draft.signals.token_probs, c_drawn))


def controlled(
    logits: Tensor, controls: LogitControls, owner: Tensor, history: TokenHistory | None
) -> Tensor:
    """Packed logits as float32, with bias and penalties applied if there are any.

    Args:
        logits: ``[rows, vocab]``.
        controls: one entry per request.
        owner: ``[rows]`` int64, whose each row is.
        history: one entry per row; needed if :attr:`LogitControls.uses_history`.
    """
    if controls.bias is None and not controls.uses_history:
        return logits.float()
    return control_logits(logits, controls.rows(owner), history)
