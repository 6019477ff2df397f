"""Drawing a draft's next token from its logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from draftwise.core.rejection import sample
from draftwise.core.sampling import (
    LogitControls,
    TokenHistory,
    control_logits,
    one_hot_where_greedy,
    probabilities,
    soft_probabilities,
)
from draftwise.core.signals import token_probabilities


class Drawn(NamedTuple):
    """One token for each row.

    Attributes:
        tokens: ``[rows]`` int64.
        is_nan: ``[rows]`` bool, whether the logits were NaN; the token is then meaningless.
        q: ``[rows, vocab]`` float32 distribution it was drawn from; ``None`` for greedy rows.
        draft_probs: ``[rows, vocab]`` float32, the draft's own distribution; ``None`` if not
            requested.
    """

    tokens: Tensor
    is_nan: Tensor
    q: Tensor | None
    draft_probs: Tensor | None


def draw(
    logits: Tensor,
    controls: LogitControls,
    token_history: TokenHistory | None,
    uniforms: Tensor | None,
    signals: bool,
) -> Drawn:
    """Draw the next token of each row.

    Args:
        logits: ``[rows, vocab]``.
        controls: one entry per row.
        token_history: needed if penalties are used.
        uniforms: ``[rows]`` float64 in [0, 1); ``None`` if all rows are greedy.
        signals: whether to return ``draft_probs``.
    """
    draft_probs = soft_probabilities(logits, controls, token_history) if signals else None
    if uniforms is None:
        scores = (
            control_logits(logits, controls, token_history) if draft_probs is None else draft_probs
        )
        tokens = scores.argmax(dim=-1)
        return Drawn(tokens, token_probabilities(scores, tokens).isnan(), None, draft_probs)
    if draft_probs is None:
        q = probabilities(logits, controls, token_history)
    elif controls.any_greedy:
        q = one_hot_where_greedy(draft_probs, draft_probs, controls)
    else:
        q = draft_probs
    return Drawn(sample(q, uniforms), q[:, 0].isnan(), q, draft_probs)
