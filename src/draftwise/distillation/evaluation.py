"""Acceptance of a draft on held-out answers, and the target's distributions of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows
from draftwise.distillation.teacher import Reading, Teacher

# Draft length of the reported figures.
NUM_DRAFTED = 5
# Largest number of probabilities of one model that are computed at once.
_MAX_PROBABILITIES = 2**24

# (rows, what the target computed for them, [rows, length] whether a draft begins after a position,
# number of steps) -> for each step k, the logits [num_drafts, draft_vocab] with which each draft
# proposes its token k, given the text
ChainLogits = Callable[[Rows, Reading, Tensor, int], Iterator[Tensor]]


@dataclass(frozen=True)
class NextTokens:
    """Positions of one row of held-out answers, and the target's distributions of their tokens.

    Attributes:
        rows: the row.
        reading: what the target computed for it.
        begins: ``[1, length]`` whether a draft begins after a position, see
            :data:`ChainLogits`.
        temperatures: ``[n]`` temperature of the answer of each true entry of ``begins``.
        logits: ``[n, vocab]`` float32, the target's logits of the token that such a draft proposes
            first.
    """

    rows: Rows
    reading: Reading
    begins: Tensor
    temperatures: Tensor
    logits: Tensor


@dataclass(frozen=True)
class FollowedDrafts:
    """Drafts along one row of held-out answers.

    Attributes:
        rows: the row.
        reading: what the target computed for it.
        begins: ``[1, length]`` whether a draft begins after a position, see :data:`ChainLogits`.
        accepted: ``[num_steps, num_drafts]`` acceptance probability of each step of each draft.
    """

    rows: Rows
    reading: Reading
    begins: Tensor
    accepted: Tensor


class HeldOut:
    """Held-out answers, and what the target computed for them.

    A chain is followed along the answer. At temperature 0 its step accepts if the draft's best
    token is the target's. At other temperatures it accepts with the probability Σ min(p, q), where
    p is the target's whole distribution. The mean accepted length is 1 + Σ_k Π_{j ≤ k} of these,
    the mean over all positions from which a whole draft fits into the answer. At temperature 0 the
    length is exact at each position. At other temperatures it is an estimate, because the answer
    follows p and not the draft. A served run begins more drafts at hard positions, so its mean is
    lower.

    With one-hot proposals, a step accepts if the draft's best token is that of the answer. This is
    what a served run does with the same answer, so there is no estimate at any temperature.
    """

    def __init__(self, teacher: Teacher, rows: Rows) -> None:
        """Compute the target's states and distributions."""
        self._teacher = teacher
        self._batches: list[tuple[Rows, Reading, Tensor, Tensor]] = []
        for index in range(len(rows)):
            row = rows.take([index], teacher.device)
            reading = teacher.read(row)
            scale = torch.nan_to_num(row.temperatures[0], nan=1.0)
            scale = torch.where(scale > 0, scale, 1.0)
            log_sums, best = teacher.normalizers(reading.final[0], scale)
            self._batches.append((row, reading, log_sums, best))

    @torch.no_grad()
    def acceptance(
        self, chain_logits: ChainLogits, target_ids: Tensor, is_one_hot: bool = False
    ) -> dict[str, float]:
        """Mean accepted lengths and acceptance of the first token, by temperature.

        Args:
            chain_logits: what the draft proposes along the answers.
            target_ids: ``[draft_vocab]`` the target's ids of the draft's tokens.
            is_one_hot: whether the draft proposes its best tokens at all temperatures.

        Returns:
            ``accepted_length/T=…`` and ``acceptance/T=…``; no entries for temperatures of which no
            answer is long enough.
        """
        lengths: dict[float, list[Tensor]] = {}
        firsts: dict[float, list[Tensor]] = {}
        for draft in self.followed(chain_logits, target_ids, NUM_DRAFTED, is_one_hot):
            accepted, temperatures = draft.accepted, draft.rows.temperatures[draft.begins]
            for temperature in sorted(set(temperatures.tolist())):
                own = accepted[:, temperatures == temperature]
                lengths.setdefault(temperature, []).append(1 + own.cumprod(0).sum(0))
                firsts.setdefault(temperature, []).append(own[0])
        result = {}
        for temperature in sorted(lengths):
            result[f"accepted_length/T={temperature:g}"] = float(
                torch.cat(lengths[temperature]).mean()
            )
            result[f"acceptance/T={temperature:g}"] = float(torch.cat(firsts[temperature]).mean())
        return result

    @torch.no_grad()
    def followed(
        self,
        chain_logits: ChainLogits,
        target_ids: Tensor,
        num_steps: int,
        is_one_hot: bool = False,
    ) -> Iterator[FollowedDrafts]:
        """Drafts from all positions of the answers from which a whole draft fits.

        Args:
            chain_logits: what the draft proposes along the answers.
            target_ids: ``[draft_vocab]`` the target's ids of the draft's tokens.
            num_steps: length of the drafts.
            is_one_hot: whether the draft proposes its best tokens at all temperatures.
        """
        target_ids = target_ids.to(self._teacher.device)
        for row, reading, log_sums, best in self._batches:
            # From the first token of the answer on, a whole draft must fit. A one-hot draft is
            # compared with the answer itself, whose last token is one position later.
            last = num_steps + int(is_one_hot)
            begins = row.is_learned & row.learned_after(1) & row.learned_after(last)
            if not bool(begins.any()):
                continue
            proposed = chain_logits(row, reading, begins, num_steps)
            if is_one_hot:
                accepted = _agreement(proposed, target_ids, row, begins)
            else:
                accepted = self._accepted(
                    proposed, target_ids, row, reading, begins, log_sums, best
                )
            yield FollowedDrafts(row, reading, begins, accepted)

    @torch.no_grad()
    def next_tokens(self) -> Iterator[NextTokens]:
        """All tokens of the answers but the first, which the target generates after the prompt.

        The rows are cut into parts whose distributions fit in memory.
        """
        size = max(1, _MAX_PROBABILITIES // self._teacher.vocab_size)
        for row, reading, _, _ in self._batches:
            begins = row.learned_after(1) & row.learned_after(2)
            if not bool(begins.any()):
                continue
            for part in torch.split(begins[0].nonzero().squeeze(1), size):
                chosen = torch.zeros_like(begins)
                chosen[0, part] = True
                logits = self._teacher.logits(reading.final[0, part + 1]).float()
                yield NextTokens(row, reading, chosen, row.temperatures[0, part], logits)

    def _accepted(
        self,
        chain: Iterator[Tensor],
        target_ids: Tensor,
        row: Rows,
        reading: Reading,
        begins: Tensor,
        log_sums: Tensor,
        best: Tensor,
    ) -> Tensor:
        """``[num_steps, num_drafts]`` acceptance probability of each step of each draft."""
        starts = begins[0].nonzero().squeeze(1)
        temperature = torch.nan_to_num(row.temperatures[0, starts], nan=1.0)
        scale = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
        steps = []
        for depth, proposed in enumerate(chain):
            # The target's distribution of this token belongs to a later position.
            label = starts + depth + 1
            logits = self._teacher.logits(reading.final[0, label], target_ids).float()
            p = (logits / scale - log_sums[label].unsqueeze(-1)).exp()
            own = proposed.float()
            overlap = torch.minimum(p, (own / scale).softmax(dim=-1)).sum(dim=-1)
            agrees = target_ids[own.argmax(dim=-1)] == best[label]
            steps.append(torch.where(temperature > 0, overlap, agrees.float()))
        return torch.stack(steps)


def _agreement(chain: Iterator[Tensor], target_ids: Tensor, row: Rows, begins: Tensor) -> Tensor:
    """``[num_steps, num_drafts]`` whether the draft's best token is that of the text."""
    starts = begins[0].nonzero().squeeze(1)
    return torch.stack(
        [
            (target_ids[proposed.argmax(dim=-1)] == row.tokens[0, starts + depth + 2]).float()
            for depth, proposed in enumerate(chain)
        ]
    )
