"""The selector of DFlash-2, which chooses among the most likely tokens by the token before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.heads.block_spec import SelectorSpec
from draftwise.models.heads.markov import Corrected


class CandidateSelector:
    """Scores of the most likely tokens, each given the token before.

    With U the logits of a position, h the output of the layers after the final norm, and A and B
    embeddings, the score of token b after token a is U(b) + ⟨A[a] ⊙ P h, B[b]⟩.
    """

    def __init__(self, spec: SelectorSpec) -> None:
        """Take over a selector. Its linear layer loses its weights."""
        self._before, self._after = spec.predecessor, spec.successor
        self._projection = join_linear([spec.projection])
        self._num_candidates = spec.num_candidates

    def first_state(self, num_rows: int) -> Tensor:
        """``[rows, 0]``: there is no state."""
        return self._before.new_zeros(num_rows, 0)

    def __call__(self, logits: Tensor, tokens: Tensor, hidden: Tensor, state: Tensor) -> Corrected:
        """The scores of one position, −∞ for tokens that are no candidates.

        Args:
            logits: ``[rows, vocab]`` of the position.
            tokens: ``[rows]`` int64, the token before.
            hidden: ``[rows, hidden]`` the output of the layers at the position, after the norm.
            state: ``[rows, 0]``.
        """
        best, candidates = logits.topk(self._num_candidates, dim=1)
        context = F.embedding(tokens, self._before) * self._projection(
            hidden.to(self._before.dtype)
        )
        after = F.embedding(candidates, self._after)
        scores = best + (context.unsqueeze(1) * after).sum(dim=2)
        wide = torch.full_like(logits, float("-inf"))
        return Corrected(wide.scatter_(1, candidates, scores.to(logits.dtype)), state)
