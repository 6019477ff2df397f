"""Drafting by kernels that read, compute and draw in one call.

Where the policy says nothing about a position, all of them are drafted in one call. Where it does,
it is asked after each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from draftwise.core.types import Draft, DraftSignals
from draftwise.engine.batch import Batch
from draftwise.engine.follower import Follower, Reading
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.position import LatePosition
from draftwise.models.native.drafting import DraftMemory, DraftRun
from draftwise.policies.base import DraftPosition, Policy


class NativeChain:
    """Drafts for all requests of a batch, on memory that is used again in the next step."""

    def __init__(self, follower: Follower) -> None:
        """Take a draft model; memory is taken when it first drafts."""
        self._follower = follower
        self._memory = DraftMemory(0, 0, 0)

    def serves(self, batch: Batch, active: Sequence[int]) -> bool:
        """Whether this step, in which some requests draft, can be drafted so."""
        controls = batch.controls
        return (
            self._follower.model.native is not None
            and controls.bias is None
            and not controls.uses_history
            and not batch.any_is_masked(active)
        )

    @torch.inference_mode()
    def draft(
        self,
        batch: Batch,
        policy: Policy,
        limits: list[int],
        active: list[int],
        pending: Iterable[Reading],
        oracle: TargetOracle | None = None,
    ) -> Draft:
        """Draft as far as the policy wants.

        Args:
            batch: the step.
            policy: is asked about each position, if it has something to say.
            limits: ``[batch]`` most tokens of each request.
            active: requests with a limit above 0.
            pending: what is to be read first, one logit for each active request.
            oracle: tells the policy what the target thinks of each token; for studies.

        Returns:
            A draft whose distributions are in memory that the next one overwrites.
        """
        follower = self._follower
        native, cache = follower.model.native, follower.cache
        assert native is not None
        memory = self._memory_for(max(limits))
        signals = policy.uses_draft_signals()
        rule = policy.draft_rule() if oracle is None else None
        asks = oracle is not None or (rule is None and policy.asks_while_drafting())
        if oracle is not None:
            oracle.begin(batch, active)
        uniforms = None if batch.uniforms is None else batch.uniforms.draft
        run = DraftRun(
            native,
            cache,
            memory,
            batch.controls,
            uniforms,
            signals,
            follower.vocab_size,
            limits,
            rule,
        )
        tokens, segments, logit_tokens = follower.gather(pending)
        run.read(tokens, segments, logit_tokens)
        for row, start, count in segments:
            cache.advance(row, start + count)
        rows = [request.row for request in batch.generating]
        texts = [len(request.tokens) for request in batch.generating]
        believed = memory.beliefs if run.keeps_beliefs else memory.probs if signals else None

        drafting, num_tokens = active, 0
        while drafting:
            at = [texts[request] + num_tokens - 1 for request in drafting]
            run.follow(drafting, [rows[request] for request in drafting], at)
            run.draw(1 if asks else max(limits))
            num_tokens = run.num_tokens
            if not asks:
                break
            position: DraftPosition = LatePosition(
                num_tokens - 1,
                drafting,
                memory.tokens[drafting, num_tokens - 1],
                memory.entropy[drafting, num_tokens - 1] if signals else None,
                memory.token_probs[drafting, num_tokens - 1] if signals else None,
                None if believed is None else believed[: len(limits), num_tokens - 1],
            )
            if oracle is not None:
                controls = batch.controls
                if len(drafting) < len(limits):
                    controls = controls.rows(torch.tensor(drafting))
                position = oracle.judge(position, controls, None)
            wanted = policy.keep_drafting(position)
            going = [True] * len(drafting) if wanted is None else wanted.tolist()
            drafting = [
                request
                for request, goes in zip(drafting, going, strict=True)
                if goes and memory.lengths[request] == num_tokens < limits[request]
            ]
            if oracle is not None and drafting:
                drawn = memory.tokens[drafting, num_tokens - 1]
                oracle.follow([rows[request] for request in drafting], drawn)
        lengths: list[int] = memory.lengths[: len(limits)].tolist()
        for request in active:
            # The last token was not read: neither a drafted one nor one that was no number.
            broken = lengths[request] < num_tokens and memory.broken[request, lengths[request]]
            drawn_tokens = lengths[request] + int(broken)
            cache.advance(rows[request], texts[request] + drawn_tokens - 1)
        return self._collect(batch, memory, lengths, num_tokens, signals, run.keeps_beliefs)

    def _memory_for(self, width: int) -> DraftMemory:
        if self._memory.width < width:
            follower = self._follower
            self._memory = DraftMemory(follower.num_rows, width, follower.vocab_size)
        return self._memory

    def _collect(
        self,
        batch: Batch,
        memory: DraftMemory,
        lengths: list[int],
        num_tokens: int,
        signals: bool,
        keeps_beliefs: bool,
    ) -> Draft:
        """What was drafted, with nothing behind each request's length."""
        count = len(lengths)
        tokens = memory.tokens[:count, :num_tokens].clone()
        uniforms = batch.uniforms
        probs = None if uniforms is None else memory.probs[:count, : num_tokens + 1]
        told: DraftSignals | None = None
        if signals:
            believed = memory.beliefs if keeps_beliefs else memory.probs
            told = DraftSignals(
                believed[:count, :num_tokens],
                memory.entropy[:count, :num_tokens].clone(),
                memory.token_probs[:count, :num_tokens].clone(),
            )
        per_request = [tokens, *(() if told is None else (told.entropy, told.token_probs))]
        wide = [] if probs is None else [probs]
        if keeps_beliefs and told is not None:
            wide.append(told.beliefs)
        for values in (*(each.numpy() for each in per_request), *(each.numpy() for each in wide)):
            for request, length in enumerate(lengths):
                if length < values.shape[1]:
                    values[request, length:] = 0
        return Draft(
            tokens,
            tuple(lengths),
            probs,
            tuple(range(-1, num_tokens - 1)),
            told,
            None if uniforms is None else uniforms.stage,
        )
