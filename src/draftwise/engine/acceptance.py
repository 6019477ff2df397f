"""The acceptance law, applied to the target's logits of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.core.formats import VerificationMethod
from draftwise.core.rejection import (
    Accepted,
    accept,
    accept_greedy,
    packed_rows,
)
from draftwise.core.sampling import (
    TokenHistory,
    control_packed_logits,
    largest_scores,
    probabilities,
)
from draftwise.core.types import Draft, Outcome, Plan
from draftwise.engine.batch import Batch, token_history_along
from draftwise.engine.masks import masks_along
from draftwise.engine.tree_acceptance import accept_trees
from draftwise.kernels.native.acceptance import accept as native_accept
from draftwise.kernels.native.library import library_for
from draftwise.kernels.native.sampling import greedy_tokens as native_greedy_tokens
from draftwise.models.memory import fetch, upload


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
        if plan.parents is not None:
            return accept_trees(batch, draft, plan, logits)
        lengths = upload(plan.lengths, torch.long, logits.device)
        owner, position = packed_rows(lengths, len(logits))
        token_history = None
        if batch.token_history is not None:
            token_history = token_history_along(
                batch.token_history, plan.tokens[owner], owner, position
            )
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
            is_copied=draft.is_copied,
            copied=draft.copied,
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
        return is_nan, accept(
            p,
            plan.proposals,
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
    return largest_scores(scores)
