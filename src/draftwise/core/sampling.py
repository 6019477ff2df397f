"""From logits to the sampling distribution, in the same way for every model.

The order is that of Hugging Face's ``generate``: logit bias and mask, repetition, presence
and frequency penalties, temperature, top-k, top-p, min-p. At temperature 0 the distribution is
one-hot at the largest logit after bias and penalties.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class LogitControls:
    """Sampling parameters of a batch as tensors, one entry per row of logits.

    A parameter that no row uses is ``None``, and its computation is skipped.

    Attributes:
        temperature: ``[rows]`` float32, 0 for greedy rows.
        all_greedy: every row has temperature 0.
        any_greedy: some row may have temperature 0. False skips the check for greedy rows.
        top_k: ``[rows]`` int64, the vocabulary size where disabled.
        top_p: ``[rows]`` float32, 1 where disabled.
        min_p: ``[rows]`` float32, 0 where disabled.
        repetition_penalty: ``[rows]`` float32, 1 where disabled.
        presence_penalty: ``[rows]`` float32, 0 where disabled.
        frequency_penalty: ``[rows]`` float32, 0 where disabled.
        bias_tokens: ``[rows, biased]`` int64, the tokens to whose logits ``bias_values`` are added.
        bias_values: ``[rows, biased]`` float32, 0 where a row has fewer tokens.
        mask: ``[rows, vocab]`` float32 added to the logits: 0 for allowed tokens and −∞ for the
            others.
    """

    temperature: Tensor
    all_greedy: bool
    any_greedy: bool = True
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    bias_tokens: Tensor | None = None
    bias_values: Tensor | None = None
    mask: Tensor | None = None

    @property
    def changes_tokens(self) -> bool:
        """Whether a bias or a penalty changes the logits of some tokens."""
        return self.bias_tokens is not None or self.uses_token_history

    @property
    def uses_token_history(self) -> bool:
        """Whether some penalty depends on the tokens so far."""
        return (
            self.repetition_penalty is not None
            or self.presence_penalty is not None
            or self.frequency_penalty is not None
        )

    def rows(self, index: Tensor) -> LogitControls:
        """Select rows by ``index``, ``[new_rows]`` int64."""
        taken: dict[str, Any] = {
            name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **taken)

    def masked(self, mask: Tensor | None) -> LogitControls:
        """Return the controls with this mask, ``[rows, vocab]``; ``None`` keeps the current one."""
        return self if mask is None else replace(self, mask=mask)


@dataclass(frozen=True)
class TokenHistory:
    """The tokens that each row's penalties depend on.

    Each token of a row occurs once. Rows with fewer tokens are padded with copies of their first
    token and its count.

    Attributes:
        tokens: ``[rows, seen]`` int64, the tokens that occur in the prompt or the output.
        counts: ``[rows, seen]`` float32, number of occurrences of the token in the output.
    """

    tokens: Tensor
    counts: Tensor

    def rows(self, index: Tensor) -> TokenHistory:
        """Select rows by ``index``, ``[new_rows]`` int64."""
        return TokenHistory(self.tokens[index], self.counts[index])

    def after(self, tokens: Tensor, valid: Tensor) -> TokenHistory:
        """Return the token history with one more output token in each row.

        Args:
            tokens: ``[rows]`` int64.
            valid: ``[rows]`` bool. Rows where it is False do not change.
        """
        repeats = (self.tokens == tokens.unsqueeze(1)) & valid.unsqueeze(1)
        counts = self.counts + repeats
        is_new = valid & ~repeats.any(dim=1)
        return TokenHistory(
            torch.cat([self.tokens, torch.where(is_new, tokens, self.tokens[:, 0])[:, None]], 1),
            torch.cat([counts, torch.where(is_new, 1.0, counts[:, 0])[:, None]], 1),
        )


def control_logits(
    logits: Tensor,
    controls: LogitControls,
    token_history: TokenHistory | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Apply bias, mask and penalties.

    These can change the argmax, so greedy decoding needs them too. Bias and penalties are computed
    for the tokens that have them, not for the whole vocabulary.

    Args:
        logits: ``[rows, vocab]`` any floating type.
        controls: one entry per row.
        token_history: needed if :attr:`LogitControls.uses_token_history`.
        overwrite: whether the result may be written over the logits, which saves a copy.

    Returns:
        ``[rows, vocab]`` float32. The input itself if it is float32 and no control applies.
    """
    scores = logits.float()
    if controls.mask is not None:
        scores = scores + controls.mask
    if not controls.changes_tokens:
        return scores
    if scores is logits and not overwrite:
        scores = scores.clone()
    if controls.bias_tokens is not None:
        assert controls.bias_values is not None
        scores.scatter_add_(1, controls.bias_tokens, controls.bias_values)
    if not controls.uses_token_history:
        return scores
    if token_history is None:
        raise ValueError("penalties need the token history")
    values = scores.gather(1, token_history.tokens)
    if controls.repetition_penalty is not None:
        # Keskar et al. 2019, "CTRL", section 4.1, in the sign-aware form of Hugging Face.
        penalty = controls.repetition_penalty.unsqueeze(1)
        values = torch.where(values < 0, values * penalty, values / penalty)
    if controls.frequency_penalty is not None:
        values = values - controls.frequency_penalty.unsqueeze(1) * token_history.counts
    if controls.presence_penalty is not None:
        values = values - controls.presence_penalty.unsqueeze(1) * (token_history.counts > 0)
    return scores.scatter_(1, token_history.tokens, values)


def control_packed_logits(
    logits: Tensor,
    controls: LogitControls,
    owner: Tensor,
    token_history: TokenHistory | None,
    mask: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """:func:`control_logits` for packed rows, of which a request may have several.

    Args:
        logits: ``[rows, vocab]``.
        controls: one entry per request.
        owner: ``[rows]`` int64, the request of each row.
        token_history: one entry per row; needed if :attr:`LogitControls.uses_token_history`.
        mask: ``[rows, vocab]``, as :attr:`LogitControls.mask` but with one entry per row.
        overwrite: whether the result may be written over the logits, which saves a copy.
    """
    if not controls.changes_tokens and mask is None:
        return logits.float()
    return control_logits(logits, controls.rows(owner).masked(mask), token_history, overwrite)


def greedy_tokens(
    logits: Tensor, controls: LogitControls, token_history: TokenHistory | None = None
) -> Tensor:
    """``[rows]`` int64, the argmax of the logits after bias, mask and penalties."""
    return control_logits(logits, controls, token_history).argmax(dim=-1)


def soft_probabilities(
    logits: Tensor, controls: LogitControls, token_history: TokenHistory | None = None
) -> Tensor:
    """The distribution of the next token after the controls, with greedy rows at temperature 1.

    At temperature 0 the sampling distribution is one-hot and carries no information about the
    model's confidence. This distribution keeps that information.

    Args:
        logits: ``[rows, vocab]`` any floating type.
        controls: one entry per row.
        token_history: needed if :attr:`LogitControls.uses_token_history`.

    Returns:
        ``[rows, vocab]`` float32, each row summing to 1, or NaN throughout where logits are NaN.
    """
    return _softened(control_logits(logits, controls, token_history), controls)


def largest_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest score of each row.

    Args:
        scores: ``[rows, vocab]`` logits with bias and penalties applied.

    Returns:
        ``[rows]`` int64, the first index of the largest score, and ``[rows]`` bool, whether a score
        is NaN.
    """
    tokens = scores.argmax(dim=-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isnan()


def probabilities(
    logits: Tensor, controls: LogitControls, token_history: TokenHistory | None = None
) -> Tensor:
    """The distribution that the next token is drawn from.

    Args:
        logits: ``[rows, vocab]`` any floating type.
        controls: one entry per row.
        token_history: needed if :attr:`LogitControls.uses_token_history`.

    Returns:
        ``[rows, vocab]`` float32, each row summing to 1, or NaN throughout where logits are NaN.
    """
    logits = control_logits(logits, controls, token_history)
    p = _softened(logits, controls)
    return one_hot_where_greedy(p, logits, controls) if controls.any_greedy else p


def one_hot_where_greedy(p: Tensor, scores: Tensor, controls: LogitControls) -> Tensor:
    """Replace the rows of ``p`` at temperature 0 by the one-hot of their largest score.

    Args:
        p: ``[rows, vocab]`` distributions.
        scores: ``[rows, vocab]`` logits, or values with the same order.
        controls: one entry per row.
    """
    largest, token = scores.max(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(p).scatter_(1, token, 1.0)
    one_hot = one_hot.masked_fill(largest.isnan(), float("nan"))
    return torch.where((controls.temperature == 0).unsqueeze(1), one_hot, p)


def _softened(logits: Tensor, controls: LogitControls) -> Tensor:
    """Apply temperature (1 for greedy rows), top-k, top-p and min-p to controlled logits."""
    temperature = controls.temperature.unsqueeze(1)
    if controls.any_greedy:
        temperature = torch.where(temperature == 0, 1.0, temperature)
    scaled = logits / temperature
    if controls.top_k is not None or controls.top_p is not None:
        scaled = _top_k_top_p(scaled, controls.top_k, controls.top_p)
    p = scaled.softmax(dim=-1)
    if controls.min_p is not None:
        floor = controls.min_p.unsqueeze(1) * p.amax(dim=-1, keepdim=True)
        p = torch.where(p < floor, 0.0, p)
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def _top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set the logits that top-k or top-p remove to minus infinity, with a single sort.

    After top-k, top-p keeps the smallest set of most likely tokens with total mass at least p
    (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1).
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        # All tokens tied with the k-th stay, as in Hugging Face. Ties are common in bfloat16.
        last = top_k.clamp(max=logits.shape[-1]).unsqueeze(1) - 1
        drop |= ordered < ordered.gather(1, last)
    if top_p is not None:
        mass = ordered.masked_fill(drop, _NEGATIVE_INFINITY).softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        # A row with top-p disabled (1) keeps every token, however its sum is rounded.
        drop |= (before >= top_p.unsqueeze(1)) & (top_p.unsqueeze(1) < 1)
        drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), _NEGATIVE_INFINITY)
