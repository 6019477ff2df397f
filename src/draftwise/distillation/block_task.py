"""Training of a head that drafts blocks, on the target's own answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.distillation.block_head import BlockHead, grid_of
from draftwise.distillation.documents import Rows
from draftwise.distillation.readings import Readings
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.tasks import MAX_LOGIT_BYTES, RowTask
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.training.losses import LOSSES, mean_loss
from draftwise.training.schedule import Schedule

# The weight of token k of a block is exp(-k / DECAY).
DECAY = 4.0


@dataclass(frozen=True)
class BlockLoss:
    """The loss of a token of a block, as a sum of two.

    Attributes:
        of_token: weight of the cross entropy to the token of the answer.
        of_distribution: weight of the loss between the target's distribution and the draft's.
        distribution: name of that loss, a key of :data:`LOSSES`.
    """

    of_token: float
    of_distribution: float
    distribution: str = "total-variation"


# Losses by the name of the setting. The L1 distance of DSpark is twice the total variation.
BLOCK_LOSSES: Mapping[str, BlockLoss] = MappingProxyType(
    {
        "tokens": BlockLoss(1.0, 0.0),
        "dspark": BlockLoss(0.1, 1.8),
        **{name: BlockLoss(0.0, 1.0, name) for name in LOSSES},
    }
)


@dataclass(frozen=True)
class TargetDistributions:
    """Distributions of the target for the tokens of blocks. Blocks overlap and share them.

    Attributes:
        p: ``[m, draft_vocab]`` float32, the target's softmax over the head's tokens.
        mass: ``[m, 1]`` probability that the target gives to these together.
        places: ``[rows, anchors, num_drafted]`` index of the distribution of each token.
    """

    p: Tensor
    mass: Tensor
    places: Tensor

    @torch.no_grad()
    def overlap(self, logits: Tensor, places: Tensor) -> Tensor:
        """``[n]`` Σ min(p, q) over the whole vocabulary.

        Args:
            logits: ``[n, draft_vocab]`` of the head.
            places: ``[n]`` index of each distribution.
        """
        p = self.p[places] * self.mass[places]
        return torch.minimum(p, logits.float().softmax(dim=-1)).sum(dim=-1)


class BlockTask(RowTask[BlockHead]):
    """Trains a head on blocks that begin at random positions of the answers.

    Of a block, the tokens are learned up to the first one that is not of the answer, or that the
    head cannot propose. The target's distribution is its softmax over the head's tokens, as in
    :class:`draftwise.distillation.chain_task.ChainTask`. The confidence learns Σ min(p, q) over the
    whole vocabulary, the probability that a sampled token is accepted.
    """

    def __init__(
        self,
        head: BlockHead,
        teacher: Teacher,
        rows: Rows,
        target_ids: Tensor,
        schedule: Schedule,
        settings: TrainingSettings,
    ) -> None:
        """Create the task at the beginning of its data.

        Args:
            head: the head, on the teacher's device.
            teacher: the target.
            rows: training rows.
            target_ids: ``[draft_vocab]`` the target's ids of the head's tokens.
            schedule: gives the sizes of a batch.
            settings: the loss, the number of blocks, the memory for readings, and the seed.
        """
        self._parts = BLOCK_LOSSES[settings.loss]
        loss = LOSSES[self._parts.distribution]
        super().__init__(head, teacher, rows, schedule, loss, settings.seed)
        self._target_ids = target_ids.to(teacher.device)
        # Own ids of the target's tokens, and -1 for those that the head cannot propose.
        self._own_ids = torch.full((teacher.vocab_size,), -1, device=teacher.device)
        self._own_ids[self._target_ids] = torch.arange(len(target_ids), device=teacher.device)
        self._num_anchors, self._seed = settings.num_anchors, settings.seed
        self._is_partial = head.confidence_head is not None and len(target_ids) < teacher.vocab_size
        self._readings = Readings(teacher, rows, settings.state_gib, has_log_sums=self._is_partial)

    @property
    def rows_per_pass(self) -> int:
        """As the schedule says, and as many as have logits that fit in memory."""
        config = self.model.config
        num_logits = self._num_anchors * config.num_drafted * config.draft_vocab_size
        fitting = MAX_LOGIT_BYTES // (4 * num_logits)
        return max(1, min(self._schedule.micro_batch_tokens // self._rows.tokens.shape[1], fitting))

    def loss_of(self, indices: Sequence[int], rows: Rows) -> Tensor:
        """See :class:`RowTask`. The position in the data chooses the blocks."""
        step = self.stream.state_dict()["count"]
        begins = self.eligible(rows).cpu()
        for number, index in enumerate(indices):
            generator = np.random.default_rng((self._seed, step, index))
            places = begins[number].nonzero().squeeze(1).numpy()
            count = min(self._num_anchors, len(places))
            chosen = generator.choice(places, count, replace=False)
            begins[number] = False
            begins[number, chosen] = True
        return self.loss(rows, self._readings.of(indices), begins.to(self._teacher.device))

    def eligible(self, rows: Rows) -> Tensor:
        """``[rows, length]`` whether a block may begin with the next token.

        That token and the one after it are of an answer, and the head can propose the latter.
        """
        known = self._own_ids[rows.tokens] >= 0
        after = torch.cat([known[:, 2:], torch.zeros_like(known[:, :2])], dim=1)
        return rows.learned_after(1) & rows.learned_after(2) & after

    def loss(self, rows: Rows, reading: Reading, begins: Tensor) -> Tensor:
        """Loss of packed rows: the mean of each token k of the blocks, weighted by exp(-k / 4).

        Args:
            rows: packed rows.
            reading: what the target computed for them.
            begins: ``[rows, length]`` some of :meth:`eligible`.
        """
        total = torch.zeros((), device=self._teacher.device)
        if not bool(begins.any()):
            return total
        head = self.model
        anchors, is_anchor = anchors_of(begins)
        columns = anchors[..., None] + torch.arange(head.config.num_drafted, device=anchors.device)
        before, labels, learned = self._labels(rows, columns, is_anchor)
        with reading.autocast():
            hidden = head(rows, reading.states, self._teacher.embedding, anchors)
            features = head.features(hidden, before)
            confidence = head.confidence_logits(hidden, before)
            target = None
            if self._parts.of_distribution or confidence is not None:
                target = self._distributions(reading, columns, learned)
            weights = 0.0
            for k in range(head.config.num_drafted):
                own = learned[..., k]
                if not bool(own.any()):
                    break
                logits = head.logits(
                    hidden[..., k, :][own], None if features is None else features[..., k, :][own]
                )
                loss = self._parts.of_token * F.cross_entropy(logits.float(), labels[..., k][own])
                if target is not None:
                    places = target.places[..., k][own]
                    distance = mean_loss(self._loss, logits, target.p, places)
                    loss = loss + self._parts.of_distribution * distance
                    if confidence is not None:
                        accepted = target.overlap(logits, places)
                        loss = loss + F.binary_cross_entropy_with_logits(
                            confidence[..., k][own], accepted
                        )
                weight = math.exp(-k / DECAY)
                total, weights = total + weight * loss, weights + weight
        return total / weights

    def _distributions(
        self, reading: Reading, columns: Tensor, learned: Tensor
    ) -> TargetDistributions:
        """The target's distributions of the tokens that are learned.

        Args:
            reading: what the target computed.
            columns: ``[rows, anchors, num_drafted]`` columns of the tokens before.
            learned: of the same shape, which tokens are learned.
        """
        length = reading.final.shape[1]
        rows = torch.arange(len(columns), device=columns.device)[:, None, None].expand_as(columns)
        needed = torch.zeros(reading.final.shape[:2], dtype=torch.bool, device=columns.device)
        needed[rows[learned], columns[learned]] = True
        final = reading.final[needed]
        logits = self._teacher.logits(final, self._target_ids).float()
        mass = torch.ones(len(final), 1, device=final.device)
        if self._is_partial:
            log_sums = reading.log_sums
            if log_sums is None:
                log_sums = self._teacher.log_sums(reading.final, needed)
            mass = (logits.logsumexp(dim=-1) - log_sums[needed]).exp().unsqueeze(1)
        place = torch.cumsum(needed.flatten(), 0).view(needed.shape) - 1
        places = place[rows, columns.clamp(max=length - 1)]
        return TargetDistributions(logits.softmax(dim=-1), mass, places)

    def _labels(
        self, rows: Rows, columns: Tensor, is_anchor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[rows, anchors, num_drafted]`` tokens before, own ids of the labels, and what counts.

        Args:
            rows: packed rows.
            columns: ``[rows, anchors, num_drafted]`` columns of the tokens before.
            is_anchor: ``[rows, anchors]``.
        """
        length = rows.tokens.shape[1]

        def at(x: Tensor, where: Tensor) -> Tensor:
            flat = where.clamp(max=length - 1).flatten(1)
            return x.gather(1, flat).view(where.shape)

        labels = self._own_ids[at(rows.tokens, columns + 1)]
        is_same = at(rows.documents, columns + 1) == at(rows.documents, columns[..., :1])
        good = is_same & at(rows.is_learned, columns + 1) & (labels >= 0) & (columns + 1 < length)
        good = good & is_anchor.unsqueeze(-1)
        return at(rows.tokens, columns), labels, good.cumprod(dim=-1).bool()


def anchors_of(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of the newest tokens of blocks.

    Args:
        begins: ``[rows, length]`` marks the last position that each block sees of the target's
            states. The block begins with the next token.

    Returns:
        ``[rows, anchors]`` columns, and whether there is a block at each place.
    """
    columns, is_anchor = grid_of(begins)
    return (columns + 1).clamp(max=begins.shape[1] - 1), is_anchor


@torch.no_grad()
def chain_logits_of_block(
    head: BlockHead,
    embedding: Tensor,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """What a head proposes along given texts, each token given those before it.

    With a head and the embedding ``[vocab, hidden]`` of the target, it is a
    :data:`draftwise.distillation.evaluation.ChainLogits`.
    """
    with reading.autocast():
        blocks = blocks_along(head, embedding, rows, reading, begins)
        yield from logits_along(head, *blocks, num_steps)


def logits_along(
    head: BlockHead, hidden: Tensor, before: Tensor, is_anchor: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """``[blocks, draft_vocab]`` of each of the first tokens of blocks; see :func:`blocks_along`."""
    features = head.features(hidden, before)
    for k in range(num_steps):
        own = None if features is None else features[..., k, :][is_anchor]
        yield head.logits(hidden[..., k, :][is_anchor], own)


def blocks_along(
    head: BlockHead, embedding: Tensor, rows: Rows, reading: Reading, begins: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks along given texts.

    Args:
        head: the head.
        embedding: ``[vocab, hidden]`` of the target.
        rows: packed rows.
        reading: what the target computed for them.
        begins: see :func:`anchors_of`.

    Returns:
        ``[rows, anchors, num_drafted, hidden]`` what the tokens are predicted from,
        ``[rows, anchors, num_drafted]`` the token before each, and ``[rows, anchors]`` whether
        there is a block.
    """
    anchors, is_anchor = anchors_of(begins)
    columns = anchors[..., None] + torch.arange(head.config.num_drafted, device=anchors.device)
    columns = columns.clamp(max=begins.shape[1] - 1)
    before = rows.tokens.gather(1, columns.flatten(1)).view(columns.shape)
    return head(rows, reading.states, embedding, anchors), before, is_anchor
