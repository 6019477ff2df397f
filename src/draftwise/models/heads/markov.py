"""The Markov head of DSpark, by which each token of a block depends on the one before."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.checkpoints.heads.block_config import MarkovKind
from draftwise.models.blocked_linear import join_linear
from draftwise.models.heads.block_spec import MarkovSpec


class Corrected(NamedTuple):
    """The logits of one position of several drafts, given the token before.

    Attributes:
        logits: ``[rows, draft_vocab]``.
        state: ``[rows, …]`` what the next position reads.
    """

    logits: Tensor
    state: Tensor


class MarkovHead:
    """A bias of the logits by the token before (DSpark, section 3).

    With W1 the embedding of that token, e = W1[x], W2 the projection to the draft's vocabulary, and
    h the output of the layers after the final norm:

    - vanilla: W2 e;
    - gated: W2 (σ(Wg [h; e] + b) ⊙ e);
    - rnn: [g; c; o] = Wj [s; e; h] + b, the state becomes σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c), and the
      bias is W2 tanh(o). The state begins as 0.
    """

    def __init__(self, spec: MarkovSpec) -> None:
        """Take over a Markov head. Its linear layers lose their weights."""
        self._kind, self._embedding = spec.kind, spec.embedding
        self._projection = join_linear([spec.projection])
        self._joint = None if spec.joint is None else join_linear([spec.joint])

    def first_state(self, num_rows: int) -> Tensor:
        """``[rows, rank]`` the state of the first position."""
        return self._embedding.new_zeros(num_rows, self._embedding.shape[1])

    def __call__(self, logits: Tensor, tokens: Tensor, hidden: Tensor, state: Tensor) -> Corrected:
        """Add the bias of one position.

        Args:
            logits: ``[rows, draft_vocab]`` of the position.
            tokens: ``[rows]`` int64, the token before, as an id of the target.
            hidden: ``[rows, hidden]`` the output of the layers at the position, after the norm.
            state: ``[rows, rank]`` the state of the position.
        """
        embedded = F.embedding(tokens, self._embedding)
        if self._kind is MarkovKind.VANILLA:
            return Corrected(logits + self._projection(embedded), state)
        assert self._joint is not None
        hidden = hidden.to(embedded.dtype)
        if self._kind is MarkovKind.GATED:
            gate = torch.sigmoid(self._joint(torch.cat((hidden, embedded), dim=1)))
            return Corrected(logits + self._projection(gate * embedded), state)
        joint = self._joint(torch.cat((state, embedded, hidden), dim=1))
        gate, candidate, out = joint.chunk(3, dim=1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return Corrected(logits + self._projection(torch.tanh(out)), state)
