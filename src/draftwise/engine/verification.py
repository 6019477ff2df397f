"""One target pass over the planned tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftwise.core.types import Plan
from draftwise.engine.batch import Batch
from draftwise.engine.kept_states import KeptStates
from draftwise.engine.lifecycle import StateRows
from draftwise.engine.logprobs import prompt_logprobs
from draftwise.engine.request import Request
from draftwise.engine.tree_paths import as_chains
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KeptPath, KVCache
from draftwise.models.memory import upload
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import SegmentTree, tree_after

if TYPE_CHECKING:
    from draftwise.engine.step import Step


class Verified(NamedTuple):
    """What the target computed in a step.

    Attributes:
        logits: ``[rows, vocab]``. Each generating request has one row per verified token and one
            row after the last. ``None`` if the step only reads prompts.
        states: by cache slot, the hidden states of all tokens that the target read, accepted or
            not; ``None`` where the proposer reads none.
    """

    logits: Tensor | None
    states: dict[int, StateRows] | None = None


class TargetVerifier:
    """Runs the target on prompt chunks and planned tokens together, packed without padding."""

    def __init__(
        self,
        model: PackedModel,
        cache: KVCache,
        state_layers: tuple[int, ...] = (),
        kept_states: KeptStates | None = None,
    ) -> None:
        """Set up.

        Args:
            model: the target.
            cache: its cache.
            state_layers: the hidden states that the proposer reads; empty for none.
            kept_states: what exits have left of the tokens to verify; ``None`` without an exit.
        """
        self._model = model
        self._cache = cache
        self._state_layers = state_layers
        self._kept_states = kept_states

    def verify(self, batch: Batch, plan: Plan) -> Verified:
        """Compute the target's logits, and its hidden states if the proposer reads them.

        Prompt log-probabilities are stored in the requests that want them.
        """
        drafted = plan.host_tokens
        indices = {request.cache_slot: index for index, request in enumerate(batch.generating)}
        chunks = {chunk.request.cache_slot: chunk for chunk in batch.chunks}
        tokens: list[int] = []
        segments: list[Segment] = []
        logit_rows: list[int] = []
        reviews: list[_Review] = []
        trees: list[SegmentTree | None] = []
        for row in sorted(indices.keys() | chunks.keys()):
            tree = None
            if row in chunks:
                request, start, end = chunks[row]
                new, num_logits = request.tokens[start:end], int(row in indices)
                if request.params.prompt_logprobs is not None:
                    # The last prompt token's logits predict the first generated token.
                    predicted = request.tokens[start + 1 : min(end + 1, len(request.tokens))]
                    reviews.append(_Review(request, predicted, len(logit_rows)))
                    num_logits = len(new)
            else:
                index = indices[row]
                request, length = batch.generating[index], plan.lengths[index]
                start = len(request.tokens) - 1
                new = [request.tokens[-1], *drafted[index][:length]]
                num_logits = len(new)
                if plan.parents is not None:
                    tree = tree_after(start, 1, plan.host_parents[index][:length])
            tokens.extend(new)
            segments.append(Segment(row, start, len(new)))
            trees.append(tree)
            logit_rows.extend(range(len(tokens) - num_logits, len(tokens)))
        tap = StateTap(self._state_layers) if self._state_layers else None
        logits = self._pass(tokens, segments, logit_rows or None, tap, trees)
        if logits is not None and reviews:
            logits = _without(reviews, logits)
        if tap is None or not segments:
            return Verified(logits)
        return Verified(logits, _states_of_slots(tap, segments))

    def _pass(
        self,
        tokens: list[int],
        segments: list[Segment],
        logit_rows: list[int] | None,
        tap: StateTap | None,
        trees: list[SegmentTree | None],
    ) -> Tensor | None:
        """The target's pass. It computes the remaining layers of tokens that an exit has read."""
        if any(tree is not None for tree in trees):
            return self._model.forward(self._cache, tokens, segments, logit_rows, tap, trees)
        kept = self._kept_states
        if kept is None or tap is not None or not kept.holds_any(segments):
            return self._model.forward(self._cache, tokens, segments, logit_rows, tap)
        return kept.run(self._cache, tokens, segments, logit_rows).logits

    def keep_paths(self, step: Step) -> Step:
        """Keep what the target computed along the accepted paths, as if chains had been verified.

        Args:
            step: a step that verified token trees.
        """
        paths = step.outcome.paths
        assert paths is not None
        offsets = [[0, *(node + 1 for node in nodes)] for nodes in paths]
        requests = step.batch.generating
        reads = [plan_length > 0 for plan_length in step.plan.lengths]
        self._cache.keep_paths(
            [
                KeptPath(request.cache_slot, len(request.tokens) - 1, kept[1:])
                for request, kept, has_tree in zip(requests, offsets, reads, strict=True)
                if has_tree
            ]
        )
        logits, states = step.logits, step.states
        if logits is not None and step.batch.wants_logprobs:
            firsts = accumulate((length + 1 for length in step.plan.lengths), initial=0)
            rows = [
                first + row for first, kept in zip(firsts, offsets, strict=False) for row in kept
            ]
            logits = logits[upload(rows, torch.long, logits.device)]
        if states is not None:
            states = dict(states)
            for request, kept, has_tree in zip(requests, offsets, reads, strict=True):
                if has_tree:
                    own = states[request.cache_slot]
                    at = upload(kept, torch.long, own.source.device)
                    path = own.rows[at]
                    states[request.cache_slot] = StateRows(own.start, path, 0, len(path))
        plan = as_chains(step.plan, paths)
        return replace(step, logits=logits, states=states, accepted=plan)


def _states_of_slots(tap: StateTap, segments: list[Segment]) -> dict[int, StateRows]:
    """The collected states by cache slot."""
    rows, first, states = tap.rows, 0, {}
    for slot, start, count in segments:
        states[slot] = StateRows(start, rows, first, count)
        first += count
    return states


class _Review(NamedTuple):
    """Rows of logits that predict prompt tokens.

    Attributes:
        request: the request of the prompt.
        tokens: the predicted prompt tokens, one per row.
        first: index of the first of these rows.
    """

    request: Request
    tokens: list[int]
    first: int


def _without(reviews: list[_Review], logits: Tensor) -> Tensor | None:
    """Store prompt log-probabilities. Returns the other rows, ``None`` if there are none."""
    others = torch.ones(len(logits), dtype=torch.bool)
    for request, tokens, first in reviews:
        rows = slice(first, first + len(tokens))
        num_top = request.params.prompt_logprobs or 0
        # They are complete before any is stored: an exception must not leave a part of them.
        computed = list(prompt_logprobs(logits[rows], tokens, num_top))
        request.prompt_logprobs.extend(computed)
        others[rows] = False
    left = others.nonzero().squeeze(1).tolist()
    return logits[upload(left, torch.long, logits.device)] if left else None
