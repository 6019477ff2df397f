"""Drawing a draft's next token from its logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from draftwise.core.rejection import sample
from draftwise.core.sampling import (
    LogitControls,
    TokenHistory,
    beliefs,
    control_logits,
    one_hot_where_greedy,
    probabilities,
)
from draftwise.core.signals import token_probabilities


class Drawn(NamedTuple):
    """One token for each row.

    Attributes:
        tokens: ``[rows]`` int64.
        broken: ``[rows]`` bool, where the logits were no numbers; the token means nothing there.
        q: ``[rows, vocab]`` float32, what it was drawn from; ``None`` if the largest was taken.
        beliefs: ``[rows, vocab]`` float32, what the draft thinks; ``None`` if nobody asks.
    """

    tokens: Tensor
    broken: Tensor
    q: Tensor | None
    beliefs: Tensor | None


def draw(
    logits: Tensor,
    controls: LogitControls,
    history: TokenHistory | None,
    uniforms: Tensor | None,
    signals: bool,
) -> Drawn:
    """Draw the next token of each row.

    Args:
        logits: ``[rows, vocab]``.
        controls: one entry per row.
        history: needed if penalties are used.
        uniforms: ``[rows]`` float64 in [0, 1); ``None`` where all rows are greedy.
        signals: whether the beliefs are wanted.
    """
    belief = beliefs(logits, controls, history) if signals else None
    if uniforms is None:
        scores = control_logits(logits, controls, history) if belief is None else belief
        tokens = scores.argmax(dim=-1)
        return Drawn(tokens, token_probabilities(scores, tokens).isnan(), None, belief)
    if belief is None:
        q = probabilities(logits, controls, history)
    elif controls.any_greedy:
        q = one_hot_where_greedy(belief, belief, controls)
    else:
        q = belief
    return Drawn(sample(q, uniforms), q[:, 0].isnan(), q, belief)
