"""The acceptance law: which drafted tokens the target keeps, and what it says instead.

One law covers everything. Each position has the target's distribution p and a *proposal* q′, a
sub-distribution that is a function of the prefix alone. A drafted token x comes from q′ (or, with
the missing mass, no token does); x is accepted with probability min(1, p(x)/q′(x)); where nothing
was accepted the token is drawn from max(p − q′, 0), normalised. Then the position has distribution
exactly p (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
theorem 1 and appendix A.1, with q replaced by q′). The bonus token is the case q′ = 0.

Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding",
algorithm 2) decides over the whole block and accepts at least as many tokens in expectation. It
needs no separate treatment of cuts and filters: give the vocabulary one more token ⊥ that the
target never says and that takes the missing mass of q′; a cut or dropped draft is a draft that
drew ⊥. Block verification on the enlarged vocabulary is lossless, never accepts ⊥ and never draws
it, and its formulas restricted to the real vocabulary are the ones below.

Shapes: ``batch`` requests, ``width`` the longest verification length, ``rows`` the sum over
requests of (verification length + 1): target distributions are packed without padding.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens summed together before one of them is drawn; about the root of a large vocabulary.
_BLOCK = 256
_LARGEST_UNIFORM = 1.0 - 2.0**-53

VerificationMethod = Literal["block", "token"]


class Accepted(NamedTuple):
    """Result of the acceptance law.

    Attributes:
        num_accepted: ``[batch]`` int64, how many leading drafted tokens are kept.
        next_tokens: ``[batch]`` int64, the corrected or bonus token that follows them.
        acceptance: ``[batch, width]`` float32, min(1, p(x)/q′(x)) of each verified token (lenience
            apart), 0 beyond the verification length.
        reach: ``[batch, width]`` float32, the probability that each verified token and all before
            it are kept, by the law that was applied: given the tokens up to it, over those after.
    """

    num_accepted: Tensor
    next_tokens: Tensor
    acceptance: Tensor
    reach: Tensor


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index per row by inverting the cumulative distribution.

    A float32 running sum over a large vocabulary loses the unlikely tokens (total variation 1e-3
    at 150,000 tokens), one in float64 is slow. So blocks are summed first, in float64, a block is
    drawn, and only its own weights are summed one by one.

    Args:
        weights: ``[rows, vocab]`` non-negative, not necessarily normalised.
        uniforms: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64. An index of weight 0 is never drawn (unless the whole row is 0, which
        gives index 0).
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
    # Rounding at the edges can point at a token of no weight: take the likeliest one instead.
    impossible = weights.gather(-1, drawn.clamp(max=vocab - 1).unsqueeze(-1)).squeeze(-1) <= 0
    return torch.where(impossible | (drawn >= vocab), weights.argmax(dim=-1), drawn)


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index ``[rows]`` that each uniform falls on, and where in it (again uniform in [0, 1))."""
    weights = weights.double()
    cumulative = weights.cumsum(dim=-1)
    threshold = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    drawn = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=weights.shape[-1] - 1)
    share = weights.gather(-1, drawn)
    within = (threshold - (cumulative.gather(-1, drawn) - share)) / share
    return drawn.squeeze(-1), within.squeeze(-1).clamp(0.0, _LARGEST_UNIFORM)


def accept_greedy(target_tokens: Tensor, tokens: Tensor, lengths: Tensor) -> Accepted:
    """The law at temperature 0, where p is one-hot: keep what the target would say itself.

    Args:
        target_tokens: ``[rows]`` int64, the target's argmax at each verified position and after.
        tokens: ``[batch, width]`` int64 drafted tokens.
        lengths: ``[batch]`` int64 verification lengths.
    """
    first_row = _first_rows(lengths)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    valid = position < lengths.unsqueeze(1)
    row = (first_row.unsqueeze(1) + position).clamp_(max=target_tokens.shape[0] - 1)
    agrees = (target_tokens[row] == tokens) & valid
    num_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    reach = agrees.float().cumprod(dim=1)
    return Accepted(num_accepted, target_tokens[first_row + num_accepted], agrees.float(), reach)


def accept(
    p: Tensor,
    proposals: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    lenience: Tensor | None = None,
    method: VerificationMethod = "block",
) -> Accepted:
    """Apply the acceptance law to a batch of drafts of different lengths.

    Args:
        p: ``[rows, vocab]`` the target's distributions, one per verified position and one after
            the last, request after request.
        proposals: ``[batch, >= width + 1, vocab]`` the sub-distributions q′; position
            ``lengths[b]`` is the proposal where no token is verified (zeros, or a filtered one).
        tokens: ``[batch, width]`` int64 drafted tokens, each with q′(x) > 0.
        lengths: ``[batch]`` int64 verification lengths, 0 … width.
        accept_uniforms: ``[batch, width]`` in [0, 1).
        final_uniforms: ``[batch]`` float64 in [0, 1).
        lenience: ``[batch]`` in (0, 1], or ``None`` for 1. Divides the denominator of the
            acceptance test and nothing else; below 1 the output is not the target's any more.
            Lenience is defined for token-by-token verification, which requests below 1 get
            whatever the method.
        method: ``"block"`` or ``"token"``.
    """
    batch, width = tokens.shape
    first_row = _first_rows(lengths)
    position = torch.arange(width, device=p.device)
    valid = position < lengths.unsqueeze(1)
    row = (first_row.unsqueeze(1) + position).clamp_(max=p.shape[0] - 1)
    p_drawn = p[row, tokens]  # [batch, width]
    q_drawn = proposals[:, :width].gather(2, tokens.unsqueeze(2)).squeeze(2)
    ratio = p_drawn / q_drawn

    index = torch.arange(batch, device=p.device)
    limit = ratio if lenience is None else ratio / lenience.unsqueeze(1)
    kept = (accept_uniforms < limit) & valid
    num_accepted = kept.long().cumprod(dim=1).sum(dim=1)
    scale = torch.ones_like(final_uniforms, dtype=p.dtype)
    reach = torch.where(valid, limit.clamp(max=1.0), 0.0).cumprod(dim=1)
    if method == "block":
        # Only for requests without lenience, which is defined token by token.
        strict = None if lenience is None else lenience == 1.0
        joint = _joint_ratio(ratio, valid)  # [batch, width + 1]
        keep_probability = _block_keep_probability(p, proposals, joint, lengths)
        kept = (accept_uniforms < keep_probability) & valid
        in_block = ((position + 1) * kept).amax(dim=1) if width else torch.zeros_like(lengths)
        num_accepted = in_block if strict is None else torch.where(strict, in_block, num_accepted)
        weight = joint[index, num_accepted]
        scale = weight if strict is None else torch.where(strict, weight, scale)
        # Block verification keeps i tokens or more with probability p_i (Sun et al. 2024).
        of_block = torch.where(valid, joint[:, 1:], 0.0)
        reach = of_block if strict is None else torch.where(strict.unsqueeze(1), of_block, reach)

    p_final = p[first_row + num_accepted]
    residual = (p_final * scale.unsqueeze(1) - proposals[index, num_accepted]).clamp_(min=0)
    # p = q′ up to rounding leaves no residual; then p itself is the right distribution.
    empty = residual.sum(dim=1, keepdim=True) <= 0
    next_tokens = sample(torch.where(empty, p_final, residual), final_uniforms)
    acceptance = torch.where(valid, ratio.clamp(max=1.0), 0.0).nan_to_num(nan=0.0)
    return Accepted(num_accepted, next_tokens, acceptance, reach.nan_to_num(nan=0.0))


def packed_rows(lengths: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Whose each packed target row is, and its position in the draft.

    Args:
        lengths: ``[batch]`` int64 verification lengths.
        num_rows: their sum plus one each.

    Returns:
        Request ``[rows]`` and position ``[rows]``, 0 for the first drafted token's.
    """
    batch = torch.arange(len(lengths), device=lengths.device)
    owner = torch.repeat_interleave(batch, lengths + 1, output_size=num_rows)
    row = torch.arange(num_rows, device=lengths.device)
    return owner, row - _first_rows(lengths)[owner]


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


def _block_keep_probability(p: Tensor, proposals: Tensor, joint: Tensor, lengths: Tensor) -> Tensor:
    """``[batch, width]`` h_1 … h_width of block verification (Sun et al. 2024, algorithm 2).

    h_i = r_i / (r_i + 1 − p_i) with r_i = Σ_x max(p_i·p(x | x_1…x_i) − q′(x | x_1…x_i), 0). At the
    end of the block q′ is 0 (or filtered), so h = p_i there without being a special case.
    """
    batch, columns = joint.shape
    owner, offset = packed_rows(lengths, p.shape[0])
    running = joint[owner, offset]
    remaining = (p * running.unsqueeze(1) - proposals[owner, offset]).clamp_(min=0).sum(dim=1)
    keep = remaining / (remaining + (1 - running))
    # 0/0 means p = q′ with p_i = 1: the next token is certain to be kept, this cut never chosen.
    keep_probability = torch.zeros(batch, columns, dtype=p.dtype, device=p.device)
    keep_probability[owner, offset] = keep.nan_to_num(nan=0.0)
    return keep_probability[:, 1:]
