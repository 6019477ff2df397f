"""The acceptance law, applied to the target's logits of a step."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from draftwise.core.rejection import (
    Accepted,
    VerificationMethod,
    accept,
    accept_greedy,
    packed_rows,
    sample,
)
from draftwise.core.sampling import (
    TokenHistory,
    control_packed_logits,
    probabilities,
)
from draftwise.core.trees import follow_drawn_children
from draftwise.core.types import Draft, Outcome, Plan, TreeProbs
from draftwise.engine.batch import Batch, token_history_along
from draftwise.engine.distributions import row_probabilities
from draftwise.engine.masks import masks_along, next_masks
from draftwise.engine.tree_paths import accepted_nodes, path_rows
from draftwise.models.native.acceptance import accept as native_accept
from draftwise.models.native.library import library_for
from draftwise.models.native.sampling import greedy_tokens as native_greedy_tokens
from draftwise.models.transfer import fetch, upload


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
            return self._accept_trees(batch, draft, plan, logits)
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
            is_one_hot=draft.is_one_hot,
            copied=draft.copied,
        )

    def _accept_trees(self, batch: Batch, draft: Draft, plan: Plan, logits: Tensor) -> Outcome:
        """Follow the tokens that are drawn from the target, or test the children that were drawn.

        The first law of :mod:`draftwise.core.trees` applies to trees that are proposed with
        certainty, and the second one to drawn trees.
        """
        device = logits.device
        owners, paths = path_rows(plan)
        owner = upload(owners, torch.long, device)
        depths = [len(path) for path in paths]
        token_history = mask = None
        if batch.token_history is not None:
            width = max(depths)
            padded = [token for path in paths for token in path + [0] * (width - len(path))]
            drafted = upload(padded, torch.long, device).view(len(paths), width)
            depth = upload(depths, torch.long, device)
            token_history = token_history_along(batch.token_history, drafted, owner, depth)
        if batch.has_masks:
            places = zip((batch.generating[index] for index in owners), paths, strict=True)
            mask = next_masks(places, logits.shape[1], device)
        is_nan, drawn = self._draw(batch, logits, owner, depths, token_history, mask)
        is_nan, drawn = fetch(is_nan, drawn)
        nodes, next_tokens = accepted_nodes(plan, drawn.tolist())
        if draft.tree_probs is not None:
            drawn_from = draft.tree_probs
            if plan.nodes is not None:
                drawn_from = drawn_from.of_nodes(plan.nodes)
            self._test_drawn(batch, plan, drawn_from, logits, nodes, next_tokens)
        unknown = torch.zeros(len(nodes), max(plan.lengths, default=0))
        failed = {index for index, bad in zip(owners, is_nan.tolist(), strict=True) if bad}
        return Outcome(
            num_drafted=draft.lengths,
            num_verified=plan.lengths,
            num_accepted=tuple(len(own) for own in nodes),
            next_tokens=tuple(next_tokens),
            acceptance=unknown,
            prefix_acceptance_prob=unknown,
            failed=frozenset(failed),
            num_known=(0,) * len(nodes),
            is_one_hot=draft.is_one_hot,
            copied=_copied_of(draft, plan),
            paths=tuple(tuple(own) for own in nodes),
            nodes=plan.nodes,
        )

    @staticmethod
    def _test_drawn(
        batch: Batch,
        plan: Plan,
        tree_probs: TreeProbs,
        logits: Tensor,
        nodes: list[list[int]],
        next_tokens: list[int],
    ) -> None:
        """Replace the paths of drawn trees in ``nodes``, and the tokens after them."""
        uniforms = batch.uniforms
        assert uniforms is not None
        first = 0
        for request, length in enumerate(plan.lengths):
            if length and tree_probs.rows[request]:
                owner = torch.tensor([request], device=logits.device)
                start = first

                def probs(node: int, start: int = start, owner: Tensor = owner) -> Tensor:
                    row = logits[start + 1 + node].unsqueeze(0)
                    return row_probabilities(row, batch.controls, owner)[0]

                nodes[request], next_tokens[request] = follow_drawn_children(
                    plan.host_tokens[request][:length],
                    plan.host_parents[request],
                    probs,
                    partial(tree_probs.of, request),
                    uniforms.accept[request].tolist(),
                    float(uniforms.final[request]),
                )
            first += length + 1

    def _draw(
        self,
        batch: Batch,
        logits: Tensor,
        owner: Tensor,
        depths: list[int],
        token_history: TokenHistory | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """``[rows]`` whether a row of logits is NaN, and the token that is drawn there.

        A row is drawn like the next token of a request without a draft, with the random number of
        its position in the output. So a seed gives the same text with trees and without drafts.
        """
        uniforms = batch.uniforms
        if uniforms is None:
            scores = control_packed_logits(
                logits, batch.controls, owner, token_history, mask, not batch.wants_logprobs
            )
            tokens, is_nan = _greedy_tokens(scores)
            return is_nan, tokens
        own, device, count = batch.controls.rows(owner), logits.device, len(logits)
        numbers = torch.cat([uniforms.final.unsqueeze(1), uniforms.following], dim=1)
        final = numbers[owner.cpu(), torch.tensor(depths)]
        library = library_for(device)
        if library is None:
            p = probabilities(logits, own.masked(mask), token_history)
            return p[:, 0].isnan(), sample(p, upload(final, torch.float64, device))
        each = torch.arange(count)
        controlled = control_packed_logits(
            logits, batch.controls, owner, token_history, mask, not batch.wants_logprobs
        )
        nothing = torch.zeros(count, 0, dtype=torch.long)
        none = torch.zeros(count, 0, dtype=torch.float64)
        is_nan, accepted = native_accept(
            library,
            controlled,
            own,
            Plan(nothing, (0,) * count, None),
            torch.zeros(count, dtype=torch.long),
            each,
            none.float(),
            final,
            none,
            None,
            False,
        )
        return is_nan, accepted.next_tokens

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


def _copied_of(draft: Draft, plan: Plan) -> tuple[Collection[int], ...] | None:
    """``[batch]`` verified nodes that were copied, by their place among the verified ones."""
    if plan.nodes is None or draft.copied is None:
        return draft.copied
    return tuple(
        [place for place, node in enumerate(chosen) if node in copied]
        for chosen, copied in zip(plan.nodes, draft.copied, strict=True)
    )


def _greedy_tokens(scores: Tensor) -> tuple[Tensor, Tensor]:
    """``[rows]`` the index of each row's largest score, and whether a score of the row is NaN."""
    library = library_for(scores.device)
    if library is not None:
        return native_greedy_tokens(library, scores)
    tokens = scores.argmax(dim=-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isnan()
