"""Drafting and judging in shares: the engine's own models take one, each replica another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.core.types import Draft, DraftRule, DraftSignals, Judgement
from draftwise.engine.batch import Batch
from draftwise.engine.drafting import ModelDraft
from draftwise.engine.follower import Follower
from draftwise.engine.judging import Companion
from draftwise.engine.replicas.processes import Replicas
from draftwise.engine.replicas.replica import cut
from draftwise.engine.replicas.share import (
    Drafted,
    DraftShare,
    JudgeShare,
    TextChange,
    part_of_batch,
    part_of_rule,
)
from draftwise.engine.replicas.told import Told
from draftwise.policies.base import DraftPosition, Policy


def in_shares(
    replicas: Replicas, draft: Follower, companion: Follower | None, vocab_size: int
) -> tuple[ReplicatedDraft, ReplicatedCompanion | None]:
    """A draft source and a companion that work in shares.

    Args:
        replicas: the processes.
        draft: the engine's own draft.
        companion: the engine's own companion, if there is one.
        vocab_size: the target's.
    """
    shares = Shares(replicas, draft, companion)
    judge = None if companion is None else ReplicatedCompanion(shares, vocab_size)
    return ReplicatedDraft(shares, vocab_size), judge


class Shares:
    """Which requests are whose, and what each replica knows of them.

    A row belongs to the replica with its number modulo theirs, so that no cache ever moves. The
    engine's own caches keep the books for all: their lengths are those of whoever has the row.

    Attributes:
        replicas: the processes.
    """

    def __init__(self, replicas: Replicas, draft: Follower, companion: Follower | None) -> None:
        """Set up.

        Args:
            replicas: the processes.
            draft: the engine's own draft.
            companion: the engine's own companion.
        """
        self.replicas = replicas
        self.draft, self.companion = draft, companion
        self._known: dict[int, tuple[int, int]] = {}

    def of(self, batch: Batch) -> list[tuple[list[int], Batch]]:
        """For each replica the indices of its requests in the batch, and its part of it."""
        count = self.replicas.count
        rows = {request.row for request in batch.generating}
        rows |= {chunk.request.row for chunk in batch.chunks}
        shares = []
        for rank in range(count):
            own = [
                index
                for index, request in enumerate(batch.generating)
                if request.row % count == rank
            ]
            whose = {row for row in rows if row % count == rank}
            shares.append((own, part_of_batch(batch, own, whose)))
        return shares

    def changes(self, part: Batch) -> list[TextChange]:
        """What a replica does not know yet of the texts of its part."""
        requests = {r.row: r for r in part.generating}
        requests |= {chunk.request.row: chunk.request for chunk in part.chunks}
        changes = []
        for row, request in requests.items():
            number, kept = self._known.get(row, (-1, 0))
            is_new = number != request.request_id
            kept = 0 if is_new else kept  # a text only grows
            changes.append(
                TextChange(
                    row,
                    is_new,
                    kept,
                    request.tokens[kept:],
                    self.draft.cache.lengths[row],
                    0 if self.companion is None else self.companion.cache.lengths[row],
                )
            )
            self._known[row] = request.request_id, len(request.tokens)
        return changes


class ReplicatedDraft:
    """Drafts in shares.

    Replicas draft by the policy's rule if it can say it in numbers. Else they draft to the limit,
    and the policy is asked afterwards, position by position, with the signals that it would have
    seen: what it would have stopped before is cut, as if it had never been drawn.

    Nothing is drafted for requests that are masked: replicas do not know what may come.
    """

    def __init__(self, shares: Shares, vocab_size: int) -> None:
        """Set up.

        Args:
            shares: of the replicas.
            vocab_size: the target's.
        """
        self._shares = shares
        self._own = ModelDraft(shares.draft, vocab_size)

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as far as the policy wants, at most to each request's limit."""
        follower, replicas = self._shares.draft, self._shares.replicas
        states = [
            state._replace(draft_limit=0) if request.is_masked else state
            for state, request in zip(
                batch.states(follower.capacity), batch.generating, strict=True
            )
        ]
        lengths = policy.draft_lengths(states)
        limits = [min(n, state.draft_limit) for n, state in zip(lengths, states, strict=True)]
        signals, rule = policy.uses_draft_signals(), policy.draft_rule()
        shares = self._shares.of(batch)
        busy = []
        for rank, (own, part) in enumerate(shares[1:], 1):
            order = self._order(part, own, limits, signals, rule)
            if order is not None:
                replicas.send(order, rank)
                busy.append(rank)
        answers = {0: self._draft_own(*shares[0], limits, signals, rule)}
        for rank in busy:
            answer: Drafted = replicas.receive(rank)
            for row, length in answer.lengths.items():
                follower.cache.lengths[row] = length
            answers[rank] = answer
        joined = _Joined(batch, max(a.draft.tokens.shape[1] for a in answers.values()))
        asked: list[int] = []
        for rank, answer in answers.items():
            own = shares[rank][0]
            joined.add(own, answer.draft, follower.device)
            if answer.notes is None:
                asked += own
            elif rule is not None:
                rule.notes.put(own, answer.notes)
        draft = joined.draft()
        if asked and policy.asks_while_drafting():
            draft = _stopped(draft, policy, sorted(asked), limits)
        return draft

    def _draft_own(
        self,
        own: list[int],
        part: Batch,
        limits: list[int],
        signals: bool,
        rule: DraftRule | None,
    ) -> Drafted:
        """What a replica does, for the engine's own share."""
        own_rule = None if rule is None else part_of_rule(rule, own)
        told = Told([limits[index] for index in own], signals, own_rule)
        draft = self._own.propose(part, told)
        return Drafted(draft, own_rule.notes if own_rule and told.by_rule else None, {})

    def _order(
        self,
        part: Batch,
        own: list[int],
        limits: list[int],
        signals: bool,
        rule: DraftRule | None,
    ) -> DraftShare | None:
        """What a replica is told; ``None`` if its share has nothing to do."""
        own_limits = [limits[index] for index in own]
        if not part.chunks and not any(own_limits):
            return None
        return DraftShare(
            self._shares.changes(part),
            [(chunk.request.row, chunk.start, chunk.end) for chunk in part.chunks],
            [request.row for request in part.generating],
            own_limits,
            part.controls,
            part.history,
            part.uniforms,
            signals,
            None if rule is None else part_of_rule(rule, own),
        )


class ReplicatedCompanion:
    """Judges in shares."""

    def __init__(self, shares: Shares, vocab_size: int) -> None:
        """Set up.

        Args:
            shares: of the replicas.
            vocab_size: the target's.
        """
        assert shares.companion is not None
        self._shares = shares
        self._cache = shares.companion.cache
        self._own = Companion(shares.companion, vocab_size)

    def read_prompts(self, batch: Batch) -> None:
        """Follow the prompts of a step that is not judged."""
        if not batch.chunks:
            return
        shares = self._shares.of(batch)
        busy = self._ask(shares, (0,) * len(batch.generating))
        self._own.read_prompts(shares[0][1])
        for rank in busy:
            self._answer(rank)

    def judge(self, batch: Batch, draft: Draft) -> Judgement:
        """What the companion thinks of each drafted position.

        Args:
            batch: the step.
            draft: with its signals.
        """
        assert draft.signals is not None
        shares = self._shares.of(batch)
        busy = self._ask(shares, draft.lengths)
        own, part = shares[0]
        answers = {0: self._own.judge(part, _part_of_draft(draft, own))}
        for rank in busy:
            answer = self._answer(rank)
            if answer is not None:
                answers[rank] = answer
        signals, device = draft.signals, draft.tokens.device
        whole = Judgement(
            torch.zeros_like(signals.beliefs),
            torch.zeros_like(signals.entropy),
            torch.zeros_like(signals.entropy),
        )
        for rank, judgement in answers.items():
            for name, values in vars(judgement).items():
                getattr(whole, name)[shares[rank][0], : values.shape[1]] = values.to(device)
        return whole

    def _ask(self, shares: list[tuple[list[int], Batch]], lengths: Sequence[int]) -> list[int]:
        """Ask replicas whose share drafted or reads prompts; returns which."""
        busy = []
        for rank, (own, part) in enumerate(shares[1:], 1):
            own_lengths = tuple(lengths[index] for index in own)
            if part.chunks or any(own_lengths):
                self._shares.replicas.send(JudgeShare(own_lengths), rank)
                busy.append(rank)
        return busy

    def _answer(self, rank: int) -> Judgement | None:
        judgement: Judgement | None
        judgement, lengths = self._shares.replicas.receive(rank)
        for row, length in lengths.items():
            self._cache.lengths[row] = length
        return judgement


class _Joined:
    """The drafts of all shares as one."""

    def __init__(self, batch: Batch, width: int) -> None:
        self._batch, self._width = batch, width
        self._lengths = [0] * len(batch.generating)
        self._values: dict[str, Tensor] = {}

    def add(self, own: list[int], draft: Draft, device: torch.device) -> None:
        """Take the draft of some requests."""
        for index, length in zip(own, draft.lengths, strict=True):
            self._lengths[index] = length
        named = {"tokens": draft.tokens, "probs": draft.probs}
        if draft.signals is not None:
            named |= vars(draft.signals)
        for name, values in named.items():
            if values is None:
                continue
            if name not in self._values:
                width = self._width + (name == "probs")
                shape = len(self._lengths), width, *values.shape[2:]
                self._values[name] = torch.zeros(shape, dtype=values.dtype, device=device)
            self._values[name][own, : values.shape[1]] = values.to(device)

    def draft(self) -> Draft:
        """What was taken."""
        values, uniforms = self._values, self._batch.uniforms
        signals = None
        if "beliefs" in values:
            signals = DraftSignals(values["beliefs"], values["entropy"], values["token_probs"])
        return Draft(
            values["tokens"],
            tuple(self._lengths),
            values.get("probs"),
            tuple(range(-1, self._width - 1)),
            signals,
            None if uniforms is None else uniforms.stage,
        )


def _part_of_draft(draft: Draft, own: list[int]) -> Draft:
    at = torch.tensor(own, dtype=torch.long, device=draft.tokens.device)
    assert draft.signals is not None
    return Draft(
        draft.tokens[at],
        tuple(draft.lengths[index] for index in own),
        None if draft.probs is None else draft.probs[at],
        draft.parents,
        DraftSignals(*(values[at] for values in vars(draft.signals).values())),
        None,
    )


def _stopped(draft: Draft, policy: Policy, requests: list[int], limits: list[int]) -> Draft:
    """A draft cut where the policy would have stopped it.

    Args:
        draft: written to the limits.
        policy: is asked about each position.
        requests: of whom it is asked.
        limits: ``[batch]`` most tokens of each.
    """
    lengths, signals = np.asarray(draft.lengths), draft.signals
    active = [index for index in requests if lengths[index] > 0]
    place = 0
    while active:
        at = torch.tensor(active, device=draft.tokens.device)
        position = DraftPosition(
            place,
            active,
            draft.tokens[at, place],
            *(
                (None, None, None)
                if signals is None
                else (values[at, place] for values in vars(signals).values())
            ),
        )
        wanted = policy.keep_drafting(position)
        going = [True] * len(active) if wanted is None else wanted.tolist()
        place += 1
        for index, goes in zip(active, going, strict=True):
            if not goes:
                lengths[index] = place
        active = [index for index in active if lengths[index] > place and limits[index] > place]
    return cut(draft, tuple(lengths.tolist()))
