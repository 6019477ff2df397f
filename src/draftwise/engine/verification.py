"""One target pass over the planned tokens, and the acceptance law applied to its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.rejection import (
    Accepted,
    VerificationMethod,
    accept,
    accept_greedy,
    packed_rows,
)
from draftwise.core.sampling import (
    TokenHistory,
    control_packed_logits,
    probabilities,
)
from draftwise.core.types import Draft, Outcome, Plan
from draftwise.engine.batch import Batch, token_history_along
from draftwise.engine.kept_states import KeptStates
from draftwise.engine.lifecycle import StateRows
from draftwise.engine.logprobs import prompt_logprobs
from draftwise.engine.masks import masks_along
from draftwise.engine.request import Request
from draftwise.models.attention import Segment
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.native.acceptance import accept as native_accept
from draftwise.models.native.library import library_for
from draftwise.models.native.sampling import greedy_tokens as native_greedy_tokens
from draftwise.models.packed_model import PackedModel
from draftwise.models.transfer import fetch, upload


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
        for row in sorted(indices.keys() | chunks.keys()):
            if row in chunks:
                request, start, end = chunks[row]
                new, num_logits = request.tokens[start:end], int(row in indices)
                if request.params.prompt_logprobs is not None:
                    # The last prompt token's logits predict the first generated token.
                    predicted = request.tokens[start + 1 : min(end + 1, len(request.tokens))]
                    reviews.append(_Review(request, predicted, len(logit_rows)))
                    num_logits = len(new)
            else:
                request = batch.generating[indices[row]]
                verified = drafted[indices[row]][: plan.lengths[indices[row]]]
                start, new = len(request.tokens) - 1, [request.tokens[-1], *verified]
                num_logits = len(new)
            tokens.extend(new)
            segments.append(Segment(row, start, len(new)))
            logit_rows.extend(range(len(tokens) - num_logits, len(tokens)))
        tap = StateTap(self._state_layers) if self._state_layers else None
        logits = self._pass(tokens, segments, logit_rows or None, tap)
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
    ) -> Tensor | None:
        """The target's pass. It computes the remaining layers of tokens that an exit has read."""
        kept = self._kept_states
        if kept is None or tap is not None or not kept.holds_any(segments):
            return self._model.forward(self._cache, tokens, segments, logit_rows, tap)
        return kept.run(self._cache, tokens, segments, logit_rows).logits


def _states_of_slots(tap: StateTap, segments: list[Segment]) -> dict[int, StateRows]:
    """The collected states by cache slot."""
    parts = torch.split(tap.rows, [count for _, _, count in segments])
    return {
        slot: StateRows(start, part) for (slot, start, _), part in zip(segments, parts, strict=True)
    }


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
        request.prompt_logprobs.extend(prompt_logprobs(logits[rows], tokens, num_top))
        others[rows] = False
    left = others.nonzero().squeeze(1).tolist()
    return logits[upload(left, torch.long, logits.device)] if left else None


class Acceptance:
    """Applies the acceptance law to a step."""

    def __init__(self, method: VerificationMethod) -> None:
        self._method = method

    def accept(self, batch: Batch, draft: Draft, plan: Plan, logits: Tensor | None) -> Outcome:
        """Decide which tokens each generating request accepts.

        Args:
            batch: the step.
            draft: the draft, for the statistics.
            plan: the verified tokens.
            logits: ``[rows, vocab]`` logits from :meth:`TargetVerifier.verify`.
        """
        if logits is None:
            return Outcome((), (), (), ())
        lengths = upload(plan.lengths, torch.long, logits.device)
        owner, position = packed_rows(lengths, len(logits))
        token_history = None
        if batch.token_history is not None:
            token_history = token_history_along(batch.token_history, plan.tokens, owner, position)
        mask = None
        if batch.has_masks:
            counts = [length + 1 for length in plan.lengths]
            drafted = plan.host_tokens
            mask = masks_along(batch.generating, drafted, counts, logits.shape[1], logits.device)
        if batch.uniforms is None:
            scores = control_packed_logits(
                logits, batch.controls, owner, token_history, mask, not batch.wants_logprobs
            )
            chosen, is_nan = _greedy_tokens(scores)
            accepted = accept_greedy(chosen, plan.tokens, lengths)
        else:
            # A policy that replaces tokens proposes its own, which are not one-hot.
            is_one_hot = draft.is_one_hot if plan.num_own is None else None
            is_nan, accepted = self._accept_sampled(
                batch, plan, is_one_hot, logits, lengths, owner, token_history, mask
            )
        is_nan, num_accepted, next_tokens, acceptance, prefix_acceptance_prob = fetch(
            is_nan, *accepted
        )
        failed: frozenset[int] = frozenset()
        if bool(is_nan.any()):
            failed = frozenset(owner.to(is_nan.device)[is_nan].tolist())
        return Outcome(
            num_drafted=draft.lengths,
            num_verified=plan.lengths,
            num_accepted=tuple(num_accepted.tolist()),
            next_tokens=tuple(next_tokens.tolist()),
            acceptance=acceptance,
            prefix_acceptance_prob=prefix_acceptance_prob,
            failed=failed,
            is_one_hot=draft.is_one_hot,
        )

    def _accept_sampled(
        self,
        batch: Batch,
        plan: Plan,
        is_one_hot: tuple[bool, ...] | None,
        logits: Tensor,
        lengths: Tensor,
        owner: Tensor,
        token_history: TokenHistory | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Accepted]:
        """Which rows have NaN logits, and the decisions of the acceptance law."""
        uniforms = batch.uniforms
        assert uniforms is not None
        device, width = logits.device, plan.tokens.shape[1]
        one_hot = None if is_one_hot is None else upload(is_one_hot, torch.bool, device)
        lenience = None
        if any(value < 1.0 for value in batch.lenience):
            lenience = upload(batch.lenience, torch.float32, device)
        library = library_for(device)
        if library is not None:
            return native_accept(
                library,
                control_packed_logits(
                    logits, batch.controls, owner, token_history, mask, not batch.wants_logprobs
                ),
                batch.controls,
                plan,
                lengths,
                owner,
                uniforms.accept,
                uniforms.final,
                uniforms.following,
                lenience,
                self._method == "block",
                one_hot,
            )
        p = probabilities(logits, batch.controls.rows(owner).masked(mask), token_history)
        is_nan = p[:, 0].isnan()
        final = upload(uniforms.final, torch.float64, device)
        proposals = plan.filtered().proposals
        return is_nan, accept(
            p,
            proposals,
            plan.tokens,
            lengths,
            upload(uniforms.accept[:, :width], torch.float32, device),
            final,
            lenience,
            self._method,
            upload(uniforms.following, torch.float64, device),
            one_hot,
        )


def _greedy_tokens(scores: Tensor) -> tuple[Tensor, Tensor]:
    """``[rows]`` the index of each row's largest score, and whether a score of the row is NaN."""
    library = library_for(scores.device)
    if library is not None:
        return native_greedy_tokens(library, scores)
    tokens = scores.argmax(dim=-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isnan()
