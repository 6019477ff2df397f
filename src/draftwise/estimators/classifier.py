"""A small neural network that predicts whether the target accepts a drafted token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.estimators.records import Records

NUM_FEATURES = 5
# Weight of rejections in the loss of SpecDec++ (Huang et al. 2024, section 4: the best of 1, 3, 6
# and 12). Drafting too many tokens costs more than stopping early.
SPECDEC_REJECTION_WEIGHT = 6.0

_HIDDEN = (16, 16)
_NUM_STEPS = 400
_LEARNING_RATE = 0.02
_WEIGHT_DECAY = 1e-4
_MIN_PROBABILITY = 1e-12


def features(
    entropy: Tensor, token_prob: Tensor, top_prob: Tensor, position: Tensor, history: Tensor
) -> Tensor:
    """The features of a drafted token that are available while drafting.

    Args:
        entropy: H(q) in nats.
        token_prob: q(x) of the drafted token.
        top_prob: largest probability of q.
        position: position in the draft, from 0.
        history: the request's mean acceptance before the step.

    Returns:
        ``[..., 5]`` float32: H, log q(x), log of the largest q, position, history.
    """
    columns = entropy, _log(token_prob), _log(top_prob), position, history
    return torch.stack([column.float() for column in columns], dim=-1)


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=_MIN_PROBABILITY).log()


@dataclass(frozen=True)
class AcceptanceHead:
    """A classifier on standardised features, with two hidden tanh layers of 16 units.

    Attributes:
        mean: ``[5]`` mean of each feature in the training data.
        scale: ``[5]`` standard deviation of each feature in the training data.
        weights: weights of each layer, ``[out, in]``.
        biases: biases of each layer, ``[out]``.
    """

    mean: Tensor
    scale: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @classmethod
    def fit(cls, records: Records, rejection_weight: float = 1.0, seed: int = 0) -> AcceptanceHead:
        """Train on recorded tokens with full-batch gradient descent.

        The label of a token is its acceptance probability y. Its weight is the probability r that
        the tokens before it are accepted. The loss −Σ r·(y·log P + w·(1 − y)·log(1 − P)) is
        therefore the expectation of the loss over accepted and rejected tokens. With w = 1, P
        estimates y. A larger w lowers P (SpecDec++'s weighted loss).

        Args:
            records: recorded tokens, at least one.
            rejection_weight: w.
            seed: seed of the initial weights.

        Raises:
            ValueError: there are no records.
        """
        if not len(records):
            raise ValueError("there are no records to train on")
        columns = (
            records.entropy,
            records.token_prob,
            records.top_prob,
            records.position,
            records.history,
        )
        x = features(*(torch.from_numpy(np.ascontiguousarray(each)) for each in columns))
        y = torch.from_numpy(np.ascontiguousarray(records.acceptance)).float()
        reach = torch.from_numpy(records.reach_probability())
        mean = x.mean(dim=0)
        scale = x.std(dim=0, correction=0)
        # A feature that is constant in training must not be divided by a scale of almost 0.
        scale = torch.where(scale > 1e-6, scale, 1.0)
        weights, biases = _first_weights(seed)
        optimizer = torch.optim.AdamW(
            [*weights, *biases], lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _NUM_STEPS)
        x = (x - mean) / scale
        total = reach.sum().clamp(min=_MIN_PROBABILITY)
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            logit = _logit(x, weights, biases)
            accepted, rejected = F.logsigmoid(logit), F.logsigmoid(-logit)
            loss = -(reach * (y * accepted + rejection_weight * (1 - y) * rejected)).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        return cls(
            mean,
            scale,
            tuple(weight.detach() for weight in weights),
            tuple(bias.detach() for bias in biases),
        )

    def predict(self, x: Tensor) -> Tensor:
        """P(accept): ``[..., 5]`` of :func:`features` to ``[...]``."""
        return _logit((x - self.mean) / self.scale, self.weights, self.biases).sigmoid()

    def to(self, device: torch.device) -> AcceptanceHead:
        """Move the head to a device; returns itself if it is there already."""
        if self.mean.device == device:
            return self
        return AcceptanceHead.from_tensors(
            {name: tensor.to(device) for name, tensor in self.to_tensors().items()}
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the parameters as named tensors, for a file."""
        layers = {f"weight{i}": weight for i, weight in enumerate(self.weights)}
        layers |= {f"bias{i}": bias for i, bias in enumerate(self.biases)}
        return {"mean": self.mean, "scale": self.scale, **layers}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> AcceptanceHead:
        """The inverse of :meth:`to_tensors`.

        Raises:
            KeyError: a tensor is missing.
        """
        layers = range(len(_HIDDEN) + 1)
        return cls(
            tensors["mean"],
            tensors["scale"],
            tuple(tensors[f"weight{i}"] for i in layers),
            tuple(tensors[f"bias{i}"] for i in layers),
        )


def _first_weights(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [NUM_FEATURES, *_HIDDEN, 1]
    weights, biases = [], []
    for num_in, num_out in pairwise(sizes):
        weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
        weights.append(weight.requires_grad_())
        biases.append(torch.zeros(num_out, requires_grad=True))
    return weights, biases


def _logit(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = F.linear(x, weight, bias).tanh()
    return F.linear(x, weights[-1], biases[-1]).squeeze(-1)
