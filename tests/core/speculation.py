"""One step of speculation on a :class:`Tree`, simulated on many requests or computed exactly.

The exact law is that of the code under test. Its acceptance thresholds and the boundaries of its
last draw are found by bisection over the uniform numbers, for every draft that can be drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftwise.core.random import StepUniforms, step_uniforms
from draftwise.core.rejection import Accepted, sample

from .statistics_tools import Tree, prefix_codes

# Arguments as those of `accept`: p, proposals, tokens, lengths, accept_uniforms, final_uniforms.
AcceptanceRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Accepted]

BISECTIONS = 48


@dataclass(frozen=True)
class Speculation:
    """The draft's distribution, and the drafted tokens that are dropped.

    Attributes:
        target: p, one position deeper than the draft.
        draft: q.
        keep: one ``[vocab ** i, vocab]`` bool table per drafted position: whether a token drawn
            there is verified. The first token that is not verified ends the verified draft.
        passes_filter: whether the rule gets the proposals q′ = q·keep. Otherwise it gets q, and
            zeros where a token was dropped. This biases the output unless every row of ``keep`` is
            all true or all false.
    """

    target: Tree
    draft: Tree
    keep: tuple[Tensor, ...]
    passes_filter: bool = True

    def proposals(self) -> Tree:
        """q′ after every prefix."""
        pairs = zip(self.draft.conditionals, self.keep, strict=True)
        return Tree(tuple(table * keep for table, keep in pairs))

    def lengths(self, tokens: Tensor) -> Tensor:
        """``[n]`` verification length of each draft in ``tokens`` (``[n, width]``)."""
        codes = prefix_codes(tokens, self.target.vocab)
        kept = [self.keep[i][codes[:, i], tokens[:, i]] for i in range(tokens.shape[1])]
        return torch.stack(kept, dim=1).long().cumprod(dim=1).sum(dim=1)

    def draft_batch(self, tokens: Tensor, limits: Tensor | None = None) -> DraftBatch:
        """The rule's input for drafts with verification lengths of at most ``limits`` (``[n]``)."""
        lengths = self.lengths(tokens)
        passed = self.proposals().along(tokens)
        if not self.passes_filter:
            passed = self.draft.along(tokens)
            passed[torch.arange(len(tokens)), lengths] = 0.0
        if limits is not None:
            # At the limit, the filter is not applied to the next token.
            cut = limits <= lengths
            passed[cut, limits[cut]] = 0.0
            lengths = torch.minimum(lengths, limits)
        return DraftBatch(self.target.along(tokens), passed, tokens, lengths)


def keep_all(draft: Tree) -> tuple[Tensor, ...]:
    """Verify everything that is drafted."""
    return tuple(torch.ones_like(table, dtype=torch.bool) for table in draft.conditionals)


def predictable_stop(draft: Tree, p_stop: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Stop after some prefixes, independently of the next token."""
    return tuple(
        (torch.rand(len(table), 1, generator=generator) >= p_stop).expand_as(table).clone()
        for table in draft.conditionals
    )


def drop_by_own_acceptance(draft: Tree, companion: Tree, threshold: float) -> tuple[Tensor, ...]:
    """Drop a token x if A(x) = min(1, c(x)/q(x)) is below the threshold."""
    return tuple(
        c >= threshold * q for q, c in zip(draft.conditionals, companion.conditionals, strict=False)
    )


@dataclass(frozen=True)
class DraftBatch:
    """A batch of drafts, as input of an acceptance rule. The target's rows are not packed.

    Attributes:
        p: ``[n, width + 1, vocab]`` the target's distributions.
        proposals: ``[n, width + 1, vocab]``.
        tokens: ``[n, width]``.
        lengths: ``[n]``.
    """

    p: Tensor
    proposals: Tensor
    tokens: Tensor
    lengths: Tensor

    def take(self, index: Tensor) -> DraftBatch:
        return DraftBatch(
            self.p[index], self.proposals[index], self.tokens[index], self.lengths[index]
        )

    def apply(
        self, rule: AcceptanceRule, accept_uniforms: Tensor, final_uniforms: Tensor
    ) -> Accepted:
        """Pack the target's rows and apply the rule, in the type of the uniform numbers."""
        packed = torch.arange(self.p.shape[1]) <= self.lengths.unsqueeze(1)
        dtype = final_uniforms.dtype
        return rule(
            self.p[packed].to(dtype),
            self.proposals.to(dtype),
            self.tokens,
            self.lengths,
            accept_uniforms,
            final_uniforms,
        )


@cache
def uniforms_for(num_requests: int, num_tokens: int, first_seed: int = 0) -> StepUniforms:
    """The uniform numbers of one step for many requests, each with its own seed."""
    seeds = list(range(first_seed, first_seed + num_requests))
    return step_uniforms(seeds, [7] * num_requests, num_tokens)


def simulate(
    speculation: Speculation,
    rule: AcceptanceRule,
    num_requests: int,
    limits: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, Accepted]:
    """Run one step for each request, then complete the sequence with the target alone.

    Returns:
        ``[num_requests, depth]`` the tokens of each request, and the result of the rule.
    """
    draft = speculation.draft
    width = draft.depth
    uniforms = uniforms_for(num_requests, width, first_seed=seed * 10**9)
    tokens = torch.zeros(num_requests, width, dtype=torch.int64)
    code = torch.zeros(num_requests, dtype=torch.int64)
    for i in range(width):
        tokens[:, i] = sample(draft.conditionals[i][code].float(), uniforms.draft[:, i])
        code = code * draft.vocab + tokens[:, i]
    batch = speculation.draft_batch(tokens, limits)
    accepted = batch.apply(rule, uniforms.accept, uniforms.final)
    output = torch.cat([tokens, torch.zeros(num_requests, 1, dtype=torch.int64)], dim=1)
    output[torch.arange(num_requests), accepted.num_accepted] = accepted.next_tokens
    generator = torch.Generator().manual_seed(seed)
    return speculation.target.complete(output, accepted.num_accepted + 1, generator), accepted


@dataclass(frozen=True)
class ExactLaw:
    """The exact outcome of a rule for a :class:`Speculation`.

    Attributes:
        joint: ``[vocab ** depth]`` probability of every output sequence.
        num_accepted: expected number of accepted tokens.
    """

    joint: Tensor
    num_accepted: float


def exact_law(
    speculation: Speculation, rule: AcceptanceRule, dtype: torch.dtype = torch.float64
) -> ExactLaw:
    """The output distribution of a rule, without sampling.

    Assumes that the rule compares each acceptance number with a threshold, that it reaches
    position i if all earlier comparisons succeed and all later ones fail, and that its last draw
    is monotone in its number.
    """
    target, draft = speculation.target, speculation.draft
    vocab, width = target.vocab, draft.depth
    drafts = torch.cartesian_prod(*[torch.arange(vocab)] * width).reshape(-1, width)
    weight = draft.joint()
    drafts, weight = drafts[weight > 0], weight[weight > 0]
    batch = speculation.draft_batch(drafts)
    num_drafts = len(drafts)

    # One row per draft and position: bisect the acceptance number of that position.
    row = torch.arange(num_drafts).repeat_interleave(width)
    position = torch.arange(width).repeat(num_drafts)
    below_one = 1 - torch.finfo(dtype).eps
    others = torch.where(torch.arange(width) < position.unsqueeze(1), 0.0, below_one).to(dtype)
    selected = batch.take(row)

    def reaches(number: Tensor) -> Tensor:
        numbers = others.scatter(1, position.unsqueeze(1), number.unsqueeze(1))
        return selected.apply(rule, numbers, torch.zeros_like(number)).num_accepted > position

    threshold = _bisect(reaches, num_drafts * width, dtype).reshape(num_drafts, width)

    # One row per draft, outcome of the comparisons, and token: bisect the number of the last draw.
    outcomes = torch.cartesian_prod(*[torch.tensor([0, 1])] * width).reshape(-1, width)
    row = torch.arange(num_drafts).repeat_interleave(len(outcomes))
    succeeds = outcomes.repeat(num_drafts, 1) == 1
    numbers = torch.where(succeeds, threshold[row] / 2, (1 + threshold[row]) / 2)
    weight = weight[row] * torch.where(succeeds, threshold[row], 1 - threshold[row]).prod(dim=1)
    row, numbers, weight = row[weight > 0], numbers[weight > 0], weight[weight > 0]
    num_accepted = batch.take(row).apply(rule, numbers.to(dtype), numbers[:, 0].to(dtype) * 0)[0]

    each = torch.arange(len(row)).repeat_interleave(vocab)
    token = torch.arange(vocab).repeat(len(row))
    selected, numbers_of_each = batch.take(row[each]), numbers[each].to(dtype)

    def at_most(number: Tensor) -> Tensor:
        return selected.apply(rule, numbers_of_each, number).next_tokens <= token

    cumulative = _bisect(at_most, len(each), dtype).reshape(len(row), vocab)
    p_next = cumulative.diff(dim=1, prepend=torch.zeros(len(row), 1, dtype=torch.float64))

    mass = [torch.zeros(vocab**i, dtype=torch.float64) for i in range(width + 2)]
    codes = prefix_codes(drafts, vocab)[row, num_accepted]
    for i in range(width + 1):
        here = num_accepted == i
        ended = torch.zeros(vocab**i, vocab, dtype=torch.float64)
        ended.index_add_(0, codes[here], weight[here].unsqueeze(1) * p_next[here])
        continued = mass[i].unsqueeze(1) * target.conditionals[i]
        mass[i + 1] = (ended + continued).flatten()
    return ExactLaw(mass[-1], float((weight * num_accepted).sum()))


def _bisect(holds: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """``[size]`` float64, the length t of the interval [0, t) in which ``holds`` is true."""
    low = torch.zeros(size, dtype=torch.float64)
    high = torch.ones(size, dtype=torch.float64)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        # In float32 the middle may round up to 1, which is not in [0, 1).
        number = middle.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)
        true = holds(number)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    # An interval that reaches the last number below 1 is the whole of [0, 1).
    return torch.where(high == 1.0, 1.0, low)
