"""A companion that runs in several processes, each for a share of every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftwise.core.types import CompanionScores, Draft, DraftSignals
from draftwise.engine.batch import Batch
from draftwise.engine.companion import CompanionModel
from draftwise.engine.parallel.replicas.messages import Scored, ScoreShare
from draftwise.engine.parallel.replicas.shares import Shares


class ReplicatedCompanion(CompanionModel):
    """Divides scoring between the engine's own companion and its replicas."""

    def __init__(self, shares: Shares, vocab_size: int) -> None:
        """Set up.

        Args:
            shares: divides batches among the replicas.
            vocab_size: the target's vocabulary size.
        """
        assert shares.companion is not None
        super().__init__(shares.companion, vocab_size)
        self._shares = shares

    def read_prompts(self, batch: Batch) -> None:
        """Read the prompt chunks of a step whose draft is not scored."""
        if not batch.chunks:
            return
        shares = self._shares.of(batch)
        busy = self._ask(shares, (0,) * len(batch.generating))
        super().read_prompts(shares[0][1])
        for rank in busy:
            self._answer(rank)

    def score(self, batch: Batch, draft: Draft) -> CompanionScores:
        """Score each drafted position.

        Args:
            batch: the step's batch.
            draft: the draft, with its signals.
        """
        assert draft.signals is not None
        shares = self._shares.of(batch)
        busy = self._ask(shares, draft.lengths)
        own, part = shares[0]
        first = super().score(part, _part_of_draft(draft, own))
        assert first is not None
        answers = {0: first}
        for rank in busy:
            answer = self._answer(rank)
            if answer is not None:
                answers[rank] = answer
        signals, device = draft.signals, draft.tokens.device
        whole = CompanionScores(
            torch.zeros_like(signals.draft_probs),
            torch.zeros_like(signals.entropy),
            torch.zeros_like(signals.entropy),
        )
        for rank, scores in answers.items():
            for name in ("probs", "overlap", "agreement"):
                values = getattr(scores, name)
                getattr(whole, name)[shares[rank][0], : values.shape[1]] = values.to(device)
        return whole

    def _ask(self, shares: list[tuple[list[int], Batch]], lengths: Sequence[int]) -> list[int]:
        """Ask the replicas that have drafts or prompt chunks. Returns their ranks."""
        busy = []
        for rank, (own, part) in enumerate(shares[1:], 1):
            own_lengths = tuple(lengths[index] for index in own)
            if part.chunks or any(own_lengths):
                self._shares.replicas.send(ScoreShare(own_lengths), rank)
                busy.append(rank)
        return busy

    def _answer(self, rank: int) -> CompanionScores | None:
        answer: Scored = self._shares.replicas.receive(rank)
        for slot, length in answer.cached.items():
            self._cached_model.cache.lengths[slot] = length
        return answer.scores


def _part_of_draft(draft: Draft, own: list[int]) -> Draft:
    at = torch.tensor(own, dtype=torch.long, device=draft.tokens.device)
    assert draft.signals is not None
    return replace(
        draft,
        tokens=draft.tokens[at],
        lengths=tuple(draft.lengths[index] for index in own),
        probs=None,  # a companion compares its own with those of the signals
        signals=DraftSignals(*(values[at] for values in vars(draft.signals).values())),
        stage_uniforms=None,
    )
