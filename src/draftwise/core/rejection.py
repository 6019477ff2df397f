"""The acceptance law: which drafted tokens are accepted, and which token replaces a rejected one.

The same law applies to full drafts, truncated drafts and filtered drafts. Each position has the
target's distribution p and a *proposal* q′, a sub-distribution that depends on the prefix alone. A
drafted token x is drawn from q′; with probability 1 − Σ q′, no token is drafted. The token x is
accepted with probability min(1, p(x)/q′(x)). If no token is accepted, the token is drawn from
max(p − q′, 0), normalised. The token at the position then has distribution exactly p (Leviathan et
al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 1 and appendix A.1,
with q replaced by q′). The bonus token is the case q′ = 0.

Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding",
algorithm 2) decides over the whole block and accepts at least as many tokens in expectation. It
needs no separate treatment of truncated and filtered drafts. Extend the vocabulary by a token ⊥
with p(⊥) = 0 and q′(⊥) equal to the missing mass of q′. A truncated or filtered draft is then a
draft that drew ⊥. Block verification on the extended vocabulary is lossless, and it never accepts
or draws ⊥. Its formulas, restricted to the real vocabulary, are the ones below.

A one-hot proposal needs no acceptance test: draw x from p, and go on while x is the proposed token.
This is the same law, as a proposed token is then accepted with probability p(x), and another token
is drawn from p without it. Each position is drawn with the random number that it has without
speculation. So a seed gives the same text with one-hot drafts of any length, and without drafts.

Shapes: ``batch`` is the number of requests, ``width`` the longest verification length, and
``rows`` the sum over requests of (verification length + 1), as target distributions are packed
without padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.core.formats import VerificationMethod

# Block size of the two-level inverse-CDF sampling: about the square root of a large vocabulary.
_BLOCK = 256
_LARGEST_UNIFORM = 1.0 - 2.0**-53


class Accepted(NamedTuple):
    """Result of the acceptance law.

    Attributes:
        num_accepted: ``[batch]`` int64, number of leading drafted tokens that are accepted.
        next_tokens: ``[batch]`` int64, the corrected or bonus token that follows them.
        acceptance: ``[batch, width]`` float32, min(1, p(x)/q′(x)) of each verified token, without
            lenience; 0 beyond the verification length.
        prefix_acceptance_prob: ``[batch, width]`` float32, the probability that each verified token
            and all before it are accepted by the chosen method. It is conditional on the tokens up
            to this one and averaged over the tokens after it.
    """

    num_accepted: Tensor
    next_tokens: Tensor
    acceptance: Tensor
    prefix_acceptance_prob: Tensor


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index per row by inverting the cumulative distribution.

    A float32 cumulative sum over a large vocabulary loses unlikely tokens (total variation 1e-3 at
    150,000 tokens), and a float64 cumulative sum is slow. Therefore blocks are summed in float64, a
    block is drawn, and a cumulative sum is computed only within that block.

    Args:
        weights: ``[rows, vocab]`` non-negative, not necessarily normalised.
        uniforms: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64. An index of weight 0 is never drawn, except index 0 for a row of zeros.
    """
    vocab = weights.shape[-1]
    if vocab <= 2 * _BLOCK:
        drawn, _ = _invert(weights, uniforms)
    else:
        blocks = F.pad(weights, (0, -vocab % _BLOCK)).view(len(weights), -1, _BLOCK)
        block, within = _invert(blocks.sum(dim=-1, dtype=torch.float64), uniforms)
        row = torch.arange(weights.shape[0], device=weights.device)
        inner, _ = _invert(blocks[row, block], within)
        drawn = block * _BLOCK + inner
    # Rounding at the edges can select a token of weight 0. Use the most likely token instead.
    impossible = weights.gather(-1, drawn.clamp(max=vocab - 1).unsqueeze(-1)).squeeze(-1) <= 0
    return torch.where(impossible | (drawn >= vocab), weights.argmax(dim=-1), drawn)


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index ``[rows]`` that each uniform selects, and its position within that index's interval.

    The position is again uniform in [0, 1).
    """
    weights = weights.double()
    cumulative = weights.cumsum(dim=-1)
    threshold = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    drawn = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=weights.shape[-1] - 1)
    share = weights.gather(-1, drawn)
    within = (threshold - (cumulative.gather(-1, drawn) - share)) / share
    return drawn.squeeze(-1), within.squeeze(-1).clamp(0.0, _LARGEST_UNIFORM)


def accept_greedy(target_tokens: Tensor, tokens: Tensor, lengths: Tensor) -> Accepted:
    """Apply the law at temperature 0, where p is one-hot: accept tokens equal to the argmax.

    Args:
        target_tokens: ``[rows]`` int64, the target's argmax at each verified position and at the
            position after the last.
        tokens: ``[batch, width]`` int64 drafted tokens.
        lengths: ``[batch]`` int64 verification lengths.
    """
    first_row = _first_rows(lengths)
    valid, row = _verified_rows(lengths, tokens.shape[1], len(target_tokens))
    agrees = (target_tokens[row] == tokens) & valid
    num_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    prefix_acceptance_prob = agrees.float().cumprod(dim=1)
    return Accepted(
        num_accepted,
        target_tokens[first_row + num_accepted],
        agrees.float(),
        prefix_acceptance_prob,
    )


def accept(
    p: Tensor,
    proposals: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    lenience: Tensor | None = None,
    method: VerificationMethod = "block",
    following_uniforms: Tensor | None = None,
    one_hot: Tensor | None = None,
) -> Accepted:
    """Apply the acceptance law to a batch of drafts of different lengths.

    Args:
        p: ``[rows, vocab]`` the target's distributions, request after request: one per verified
            position and one after the last.
        proposals: ``[batch, >= width + 1, vocab]`` the sub-distributions q′. Position
            ``lengths[b]`` is the proposal after the verified tokens: zeros, or a filtered one.
            ``None`` for one-hot proposals: q′ is 1 for each verified token, and 0 everywhere from
            ``lengths[b]`` on.
        tokens: ``[batch, width]`` int64 drafted tokens, each with q′(x) > 0.
        lengths: ``[batch]`` int64 verification lengths, 0 … width.
        accept_uniforms: ``[batch, width]`` in [0, 1).
        final_uniforms: ``[batch]`` float64 in [0, 1).
        lenience: ``[batch]`` in (0, 1], or ``None`` for 1. It divides the ratio p(x)/q′(x) in the
            acceptance test and has no other effect. Below 1 the output distribution is no longer
            the target's. Lenience is defined for token-by-token verification, so requests with a
            lenience below 1 use that method in either case.
        method: ``"block"`` or ``"token"``.
        following_uniforms: ``[batch, >= width]`` float64 in [0, 1), the ``final_uniforms`` of steps
            that would begin after each drafted token. Required for one-hot proposals.
        one_hot: ``[batch]`` bool, the requests whose proposals are all one-hot; ``None`` if that
            holds for all requests without ``proposals``, and for none with them.
    """
    if proposals is None:
        one_hot, method = torch.ones_like(lengths, dtype=torch.bool), "token"
    arguments = p, proposals, tokens, lengths, accept_uniforms, final_uniforms, lenience, method
    if one_hot is None:
        return _accept_by_ratio(*arguments)
    assert following_uniforms is not None
    uniforms = torch.cat([final_uniforms.unsqueeze(1), following_uniforms], dim=1)
    drawn = _accept_one_hot(p, tokens, lengths, uniforms)
    # Lenience is defined for the acceptance test.
    is_drawn = one_hot if lenience is None else one_hot & (lenience == 1.0)
    if bool(is_drawn.all()):
        return drawn
    tested = _accept_by_ratio(*arguments)
    return Accepted(
        *(
            torch.where(is_drawn.view(-1, *[1] * (ours.dim() - 1)), ours, other)
            for ours, other in zip(drawn, tested, strict=True)
        )
    )


def _accept_one_hot(p: Tensor, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Accepted:
    """The law for one-hot proposals: draw x from p, and go on while x is the proposed token.

    Args:
        p: ``[rows, vocab]`` as in :func:`accept`.
        tokens: ``[batch, width]`` int64 proposed tokens.
        lengths: ``[batch]`` int64 verification lengths.
        uniforms: ``[batch, > width]`` float64 in [0, 1), one for each position.
    """
    owner, position = packed_rows(lengths, p.shape[0])
    drawn = sample(p, uniforms[owner, position])
    accepted = accept_greedy(drawn, tokens, lengths)
    valid, row = _verified_rows(lengths, tokens.shape[1], len(p))
    acceptance = torch.where(valid, p[row, tokens], 0.0).nan_to_num(nan=0.0)
    return accepted._replace(
        acceptance=acceptance, prefix_acceptance_prob=acceptance.cumprod(dim=1)
    )


def _accept_by_ratio(
    p: Tensor,
    proposals: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    lenience: Tensor | None,
    method: VerificationMethod,
) -> Accepted:
    """:func:`accept` with an acceptance test of each token."""
    batch, width = tokens.shape
    first_row = _first_rows(lengths)
    valid, row = _verified_rows(lengths, width, len(p))
    p_drawn = p[row, tokens]  # [batch, width]
    ratio = p_drawn
    if proposals is not None:
        ratio = p_drawn / proposals[:, :width].gather(2, tokens.unsqueeze(2)).squeeze(2)

    index = torch.arange(batch, device=p.device)
    limit = ratio if lenience is None else ratio / lenience.unsqueeze(1)
    kept = (accept_uniforms < limit) & valid
    num_accepted = kept.long().cumprod(dim=1).sum(dim=1)
    scale = torch.ones_like(final_uniforms, dtype=p.dtype)
    prefix_acceptance_prob = torch.where(valid, limit.clamp(max=1.0), 0.0).cumprod(dim=1)
    if method == "block":
        # Block verification applies only to requests with a lenience of 1.
        strict = None if lenience is None else lenience == 1.0
        joint = _joint_ratio(ratio, valid)  # [batch, width + 1]
        keep_probability = _block_keep_probability(p, proposals, tokens, joint, lengths)
        kept = (accept_uniforms < keep_probability) & valid
        count = torch.arange(1, width + 1, device=p.device)
        in_block = (count * kept).amax(dim=1) if width else torch.zeros_like(lengths)
        num_accepted = in_block if strict is None else torch.where(strict, in_block, num_accepted)
        weight = joint[index, num_accepted]
        scale = weight if strict is None else torch.where(strict, weight, scale)
        # Block verification accepts i tokens or more with probability p_i (Sun et al. 2024).
        of_block = torch.where(valid, joint[:, 1:], 0.0)
        prefix_acceptance_prob = (
            of_block
            if strict is None
            else torch.where(strict.unsqueeze(1), of_block, prefix_acceptance_prob)
        )

    p_final = p[first_row + num_accepted]
    residual = _residual(
        p_final * scale.unsqueeze(1), proposals, tokens, lengths, index, num_accepted
    )
    # If p = q′ up to rounding, the residual is empty and p itself is the right distribution.
    empty = residual.sum(dim=1, keepdim=True) <= 0
    next_tokens = sample(torch.where(empty, p_final, residual), final_uniforms)
    acceptance = torch.where(valid, ratio.clamp(max=1.0), 0.0).nan_to_num(nan=0.0)
    return Accepted(
        num_accepted, next_tokens, acceptance, prefix_acceptance_prob.nan_to_num(nan=0.0)
    )


def packed_rows(lengths: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the request of each packed target row, and its position in the draft.

    Args:
        lengths: ``[batch]`` int64 verification lengths.
        num_rows: sum over requests of (verification length + 1).

    Returns:
        Request ``[rows]`` and position ``[rows]``, where position 0 is the first drafted token.
    """
    # repeat_interleave would wake PyTorch's threads, which take the cores from the native kernels.
    first = _first_rows(lengths)
    ends = first + lengths + 1
    is_end = torch.zeros(num_rows + 1, dtype=torch.long, device=lengths.device)
    owner = is_end.index_add_(0, ends, torch.ones_like(ends)).cumsum(dim=0)[:-1]
    row = torch.arange(num_rows, device=lengths.device)
    return owner, row - first[owner]


def _verified_rows(lengths: Tensor, width: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Whether each draft position is verified, and its row among the packed target rows.

    Both are ``[batch, width]``. Rows of positions that are not verified are any existing ones.
    """
    position = torch.arange(width, device=lengths.device)
    row = (_first_rows(lengths).unsqueeze(1) + position).clamp_(max=num_rows - 1)
    return position < lengths.unsqueeze(1), row


def _first_rows(lengths: Tensor) -> Tensor:
    """``[batch]`` index of each request's first row among the packed target rows."""
    ends = (lengths + 1).cumsum(dim=0)
    return ends - (lengths + 1)


def _joint_ratio(ratio: Tensor, valid: Tensor) -> Tensor:
    """``[batch, width + 1]`` p_i of block verification: p_0 = 1, p_i = min(p_{i−1}·ratio_i, 1)."""
    batch, width = ratio.shape
    joint = torch.ones(batch, width + 1, dtype=ratio.dtype, device=ratio.device)
    for i in range(width):
        step = torch.where(valid[:, i], ratio[:, i], 1.0)
        joint[:, i + 1] = (joint[:, i] * step).clamp(max=1.0)
    return joint


def _residual(
    scaled: Tensor,
    proposals: Tensor | None,
    tokens: Tensor,
    lengths: Tensor,
    owner: Tensor,
    position: Tensor,
) -> Tensor:
    """max(s·p − q′, 0) at the given positions.

    Args:
        scaled: ``[rows, vocab]`` s·p, with s ≤ 1; may be overwritten.
        proposals, tokens, lengths: as in :func:`accept`.
        owner: ``[rows]`` request of each row.
        position: ``[rows]`` position of each row in its request's draft.
    """
    if proposals is not None:
        return (scaled - proposals[owner, position]).clamp_(min=0)
    if not tokens.shape[1]:
        return scaled
    # s·p(x) ≤ 1 = q′(x), so the residual is 0 for the proposed token and s·p for all others.
    column = tokens[owner, position.clamp(max=tokens.shape[1] - 1)].unsqueeze(1)
    proposed = (position < lengths[owner]).unsqueeze(1)
    return scaled.scatter_(1, column, torch.where(proposed, 0.0, scaled.gather(1, column)))


def _block_keep_probability(
    p: Tensor, proposals: Tensor | None, tokens: Tensor, joint: Tensor, lengths: Tensor
) -> Tensor:
    """``[batch, width]`` h_1 … h_width of block verification (Sun et al. 2024, algorithm 2).

    h_i = r_i / (r_i + 1 − p_i) with r_i = Σ_x max(p_i·p(x | x_1…x_i) − q′(x | x_1…x_i), 0). At the
    end of the block q′ is 0 (or filtered), so the same formula applies; with q′ = 0 it is h = p_i.
    """
    batch, columns = joint.shape
    owner, offset = packed_rows(lengths, p.shape[0])
    running = joint[owner, offset]
    scaled = p * running.unsqueeze(1)
    remaining = _residual(scaled, proposals, tokens, lengths, owner, offset).sum(dim=1)
    keep = remaining / (remaining + (1 - running))
    # 0/0 means p = q′ with p_i = 1. The next token is then always accepted, so h_i is irrelevant.
    keep_probability = torch.zeros(batch, columns, dtype=p.dtype, device=p.device)
    keep_probability[owner, offset] = keep.nan_to_num(nan=0.0)
    return keep_probability[:, 1:]
