"""A step of a steered draft model, whichever of vLLM's model runners it drafts for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from draftwise.core.sampling import LogitControls, beliefs
from draftwise.core.types import Draft, Judgement
from draftwise.engine.judging import judgement
from draftwise.integrations.vllm.following import (
    Drafted,
    Follower,
    Integers,
    Packed,
    in_passes,
    pack,
)
from draftwise.integrations.vllm.metrics import Metrics
from draftwise.integrations.vllm.steering import Decision, Steering
from draftwise.integrations.vllm.steps import Member, Verified
from draftwise.models.native.library import library_for
from draftwise.models.native.sampling import distributions

# Gives ``[tokens]`` on the device: those of requests by their rows, at places of text and draft.
TokensAt = Callable[[Integers, Integers], Tensor]
# One pass: ``[m, vocab]`` logits of those of its tokens that are wanted, by their ``[m]`` indices.
Read = Callable[[Packed, Tensor, Integers], Tensor]
# What a companion thinks of a draft: ``[drafted tokens, vocab]`` logits, request after request.
Judge = Callable[[Draft], Tensor]


class Enough(Exception):  # noqa: N818
    """Nobody goes on drafting."""


class Drafting:
    """Asks the policy before, while and after the draft model of vLLM drafts.

    Attributes:
        steering: with the policy.
    """

    def __init__(self, steering: Steering) -> None:
        """Before the first step.

        Args:
            steering: with the policy.
        """
        self.steering = steering
        self._metrics = Metrics() if get_tp_group().is_first_rank else None
        self._began = 0.0
        self._controls = LogitControls(torch.zeros(0), all_greedy=True)

    def begin(
        self,
        members: Sequence[Member],
        verified: Mapping[str, Verified],
        num_read: int,
        controls: LogitControls,
    ) -> int:
        """Tell what became of the last step and ask for the next; the longest draft.

        Args:
            members: the requests of the step.
            verified: what became of the drafts of those that generate.
            num_read: tokens in the target's pass, of prompts too.
            controls: how the draft model samples.
        """
        now = time.perf_counter()
        of_prompts = num_read - sum(v.num_sent + 1 for v in verified.values())
        settled = self.steering.settle(dict(verified), now - self._began, max(of_prompts, 0))
        if settled is not None and self._metrics is not None:
            self._metrics.observe(settled)
        self._began, self._controls = now, controls
        return self.steering.begin(members)

    def beliefs(self, logits: Tensor) -> Tensor | None:
        """What the draft thinks, at temperature 1 of greedy requests; nothing if nobody asks.

        Args:
            logits: ``[batch, vocab]``.

        Returns:
            ``[batch, vocab]`` probabilities.
        """
        if not self.steering.wants_beliefs:
            return None
        library, logits = library_for(logits.device), logits.float()
        if library is None:
            return beliefs(logits, self._controls)
        owner = torch.arange(len(logits))
        return distributions(library, logits, self._controls, owner, softens_greedy=True)

    def drawn(self, tokens: Tensor, believed: Tensor | None) -> None:
        """One more token was drafted for everybody.

        Args:
            tokens: ``[batch]``.
            believed: what :meth:`beliefs` said before they were drawn.

        Raises:
            Enough: nobody goes on.
        """
        if not self.steering.drawn(tokens, believed):
            raise Enough

    def finish(self, judge: Judge | None) -> list[int]:
        """How many leading tokens of each request to send.

        Args:
            judge: asks the companion; ``None`` if there is none.
        """
        draft_seconds = time.perf_counter() - self._began

        def ask(draft: Draft) -> tuple[Judgement, float]:
            asked = time.perf_counter()
            return self._judged(draft, judge), time.perf_counter() - asked

        return self.steering.finish(
            None if judge is None else ask, time.perf_counter, draft_seconds
        )

    def _judged(self, draft: Draft, judge: Judge | None) -> Judgement:
        """S and A of a draft."""
        assert judge is not None
        logits = judge(draft).float()
        return judgement(logits, self._controls, list(draft.lengths), None, draft)


class DraftReader:
    """Has a model judge drafts that reads of a text what it has not seen when it is asked.

    Its keys and values lie in blocks that vLLM gives a request for as long as it runs. In steps in
    which it is not asked it does nothing.
    """

    def __init__(self, read: Read, block_size: int, most_tokens: int) -> None:
        """Nothing was read yet.

        Args:
            read: one pass.
            block_size: tokens of a block of keys and values.
            most_tokens: of a pass.
        """
        self._read = read
        self._most_tokens = most_tokens
        self._follower = Follower(block_size)

    def judge(
        self, drafted: Drafted, tokens_at: TokensAt, blocks: Integers, running: Collection[str]
    ) -> Tensor:
        """What it thinks of drafts: one pass, or more where that is longer than vLLM's largest.

        Args:
            drafted: at least one request.
            tokens_at: tokens of texts and drafts.
            blocks: ``[batch, most]`` blocks of keys and values.
            running: names of all requests of the batch.

        Returns:
            ``[drafted tokens, vocab]`` logits at the place of each drafted token, request after
            request.
        """
        self._follower.keep_only(running)
        spans = self._follower.unread(drafted, blocks[drafted.rows])
        firsts = np.zeros(len(blocks), dtype=np.int64)
        firsts[drafted.rows] = drafted.text_lengths - 1
        found = []
        for part in in_passes(spans, self._most_tokens):
            packed = pack(part)
            tokens = tokens_at(packed.owners, packed.positions)
            wanted = np.flatnonzero(packed.positions >= firsts[packed.owners])
            found.append(self._read(packed, tokens, wanted))
        self._follower.follow(drafted.names, drafted.text_lengths, blocks[drafted.rows])
        return torch.cat(found)


def drafted_requests(draft: Draft, names: Sequence[str], text_lengths: Integers) -> Drafted:
    """The requests of a batch that have a draft.

    Args:
        draft: of the batch.
        names: of its requests.
        text_lengths: ``[batch]`` tokens of each.
    """
    lengths = np.array(draft.lengths, dtype=np.int64)
    rows = np.flatnonzero(lengths)
    return Drafted([names[row] for row in rows.tolist()], rows, text_lengths[rows], lengths[rows])


def of_first_rank(decision: Decision) -> Decision:
    """What the first of the ranks decides that share each model."""
    group = get_tp_group()
    if group.world_size == 1:
        return decision
    agreed: Decision = group.broadcast_object(decision, src=0)
    return agreed
