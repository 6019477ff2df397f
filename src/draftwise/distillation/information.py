"""What a companion knows of the acceptance of a draft's tokens, on held-out answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwise.core.signals import agreement, entropy, overlap, token_probabilities
from draftwise.distillation.evaluation import ChainLogits, HeldOut, NextTokens
from draftwise.distillation.scored_draft import LoadedDraft
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Floats, Records


@dataclass(frozen=True)
class _Part:
    """Distributions of the same tokens. At temperature 0 they are those at temperature 1.

    Attributes:
        temperatures: ``[n]``.
        p, c: ``[n, vocab]`` of the target and of the companion.
        q: ``[n, vocab]`` of the draft; ``None`` without one.
    """

    temperatures: Tensor
    p: Tensor
    c: Tensor
    q: Tensor | None


class CompanionMeasures:
    """Measures a companion on held-out answers, and compares it with the draft that it will score.

    At each token of an answer, the draft proposes one token x after the text before. Its signals S
    and A, its acceptance probability and a sample of its acceptance are recorded as
    ``draftwise profile`` records them, and evaluated by :mod:`draftwise.estimators.information`. At
    temperature 0, x is the draft's best token, and S and A are those at temperature 1, as in a
    served run.
    """

    def __init__(self, companion: ChainLogits, draft: LoadedDraft | None, seed: int) -> None:
        """Set up.

        Args:
            companion: what the companion proposes along given texts.
            draft: the draft; ``None`` if none is named.
            seed: seed of the proposed tokens and of their acceptance.
        """
        self._companion, self._draft, self._seed = companion, draft, seed
        self._draft_acceptance: dict[str, float] | None = None

    @torch.no_grad()
    def __call__(self, held_out: HeldOut) -> Mapping[str, float]:
        """Measure.

        Returns:
            For each temperature T of the answers, as ``NAME/T=…``:

            - ``target_overlap``: mean Σ min(p, c), the overlap of companion and target;
            - with a draft, ``draft_accepted_length`` and ``draft_acceptance``: see
              :meth:`HeldOut.acceptance`;
            - ``draft_target_overlap``: mean Σ min(p, q);
            - ``overlap``: mean S = Σ min(q, c);
            - ``correlation``: Pearson's, of A and the acceptance probability;
            - ``information``: information gain of S and A about acceptance, in bits (adaptive bins,
              corrected);
            - ``draft_information``: that of q(x), which needs no companion;
            - ``entropy``: the entropy of acceptance, which bounds both;
            - ``num_tokens``: number of the draft's tokens behind these.
        """
        overlaps: dict[float, list[Tensor]] = {}
        draft_overlaps: dict[float, list[Tensor]] = {}
        records: dict[float, list[Records]] = {}
        generator = torch.Generator().manual_seed(self._seed)
        for part in self._parts(held_out):
            with_target = overlap(part.p, part.c)
            for temperature in sorted(set(part.temperatures.tolist())):
                own = part.temperatures == temperature
                overlaps.setdefault(temperature, []).append(with_target[own])
                if part.q is None:
                    continue
                p, q, c = part.p[own], part.q[own], part.c[own]
                draft_overlaps.setdefault(temperature, []).append(overlap(p, q))
                records.setdefault(temperature, []).append(
                    _records(p, q, c, temperature == 0, generator)
                )
        values = {}
        for temperature, found in sorted(overlaps.items()):
            values[f"target_overlap/T={temperature:g}"] = float(torch.cat(found).mean())
        values |= self._of_draft(held_out)
        for temperature, parts in sorted(records.items()):
            with_draft = {
                "draft_target_overlap": float(torch.cat(draft_overlaps[temperature]).mean()),
                **_figures(Records.join(parts)),
            }
            values |= {f"{name}/T={temperature:g}": each for name, each in with_draft.items()}
        return values

    def _of_draft(self, held_out: HeldOut) -> dict[str, float]:
        """Acceptance of the draft, which is computed once."""
        if self._draft is None:
            return {}
        if self._draft_acceptance is None:
            draft = self._draft
            found = held_out.acceptance(draft.chain_logits, draft.target_ids)
            self._draft_acceptance = {f"draft_{name}": value for name, value in found.items()}
        return self._draft_acceptance

    def _parts(self, held_out: HeldOut) -> Iterator[_Part]:
        for tokens in held_out.next_tokens():
            scale = torch.where(tokens.temperatures > 0, tokens.temperatures, 1.0).unsqueeze(-1)
            p = (tokens.logits / scale).softmax(dim=-1)
            c = (_first(self._companion, tokens) / scale).softmax(dim=-1)
            q = None
            if self._draft is not None:
                own = (_first(self._draft.chain_logits, tokens) / scale).softmax(dim=-1)
                ids = self._draft.target_ids.to(p.device)
                q = torch.zeros_like(p).index_copy_(1, ids, own)
            yield _Part(tokens.temperatures, p, c, q)


def _first(chain_logits: ChainLogits, tokens: NextTokens) -> Tensor:
    """``[n, draft_vocab]`` float32 logits with which drafts propose their first tokens."""
    return next(chain_logits(tokens.rows, tokens.reading, tokens.begins, 1)).float()


def _records(
    p: Tensor, q: Tensor, c: Tensor, is_greedy: bool, generator: torch.Generator
) -> Records:
    """One drafted token of each position: ``[n, vocab]`` distributions to ``n`` records."""
    size = len(q)
    if is_greedy:
        x = q.argmax(dim=-1)
        acceptance = _floats(x == p.argmax(dim=-1))
    else:
        x = torch.multinomial(q.cpu(), 1, generator=generator).squeeze(1).to(q.device)
        acceptance = _floats((token_probabilities(p, x) / token_probabilities(q, x)).clamp(max=1.0))
    return Records(
        chain=np.arange(size),
        position=np.zeros(size, dtype=np.int64),
        entropy=_floats(entropy(q)),
        token_prob=_floats(token_probabilities(q, x)),
        top_prob=_floats(q.amax(dim=-1)),
        overlap=_floats(overlap(q, c).clamp(max=1.0)),  # rounding may exceed 1
        agreement=_floats(token_probabilities(agreement(q, c), x)),
        history=np.zeros(size, dtype=np.float32),
        acceptance=acceptance,
        accepted=torch.rand(size, generator=generator).numpy() < acceptance,
    )


def _figures(records: Records) -> dict[str, float]:
    gains = information_gains(records)
    return {
        "overlap": float(records.overlap.mean()),
        "correlation": pearson(records.agreement, records.acceptance),
        "information": gains["S,A adaptive"].corrected,
        "draft_information": gains["q(x)"].corrected,
        "entropy": gains["q(x)"].entropy,
        "num_tokens": float(len(records)),
    }


def _floats(values: Tensor) -> Floats:
    found: Floats = values.float().cpu().numpy()
    return found
