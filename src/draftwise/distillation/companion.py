"""``draftwise train companion``: how a companion is distilled from the target, and measured.

A companion is a model like that of :mod:`draftwise.distillation.model`. It scores a draft by its
own distribution. It helps where it is closer to the target than the draft, and makes other errors.
It is therefore larger, and begins from other weights and another order of the data than a draft of
the same seed. The split into training and held-out prompts is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.checkpoints.heads import public_name
from draftwise.core.signals import agreement, entropy, overlap, token_probabilities
from draftwise.distillation.card import CardTexts
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Rows
from draftwise.distillation.evaluation import ChainLogits, HeldOut, NextTokens
from draftwise.distillation.model import ModelRecipe
from draftwise.distillation.recipe import Prepared
from draftwise.distillation.scored_draft import LoadedDraft, find_draft
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.teacher import Teacher
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Floats, Records
from draftwise.training.schedule import Schedule

# Added to the seed of the weights and of the order of the data.
_SEED_OFFSET = 1_000


class CompanionRecipe(ModelRecipe):
    """Trains a new Llama as a companion, and measures what it knows of a draft."""

    def __init__(self, settings: TrainingSettings, trust_remote_code: bool = False) -> None:
        """See :class:`Recipe`; finds the draft, if one is named."""
        super().__init__(settings, trust_remote_code)
        self._draft = None
        if settings.draft is not None:
            self._draft = find_draft(
                settings.draft, settings.target, settings.length, trust_remote_code
            )

    @property
    def seed(self) -> int:
        """Another one than that of a draft."""
        return self.settings.seed + _SEED_OFFSET

    def check(self, config: Any) -> None:
        """See :class:`Recipe`."""
        if self._draft is not None:
            self._draft.check(config)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See :class:`Recipe`; the states that a head reads."""
        return () if self._draft is None else self._draft.layers(num_layers)

    def prepare(
        self, teacher: Teacher, collected: Collected, rows: Rows, schedule: Schedule
    ) -> Prepared:
        """See :class:`Recipe`."""
        prepared = super().prepare(teacher, collected, rows, schedule)
        facts: dict[str, Any] = {**prepared.facts, "kind": "companion"}
        draft = None
        if self._draft is not None:
            draft = self._draft.load(teacher)
            facts["draft_parameters"] = draft.num_parameters
        measure = CompanionMeasures(prepared.chain_logits, draft, self.seed)
        return replace(prepared, facts=facts, measure=measure)

    def card(self, facts: Mapping[str, Any]) -> CardTexts:
        """See :class:`Recipe`."""
        draft = self.settings.draft
        shown = "path/of/the/draft" if draft is None else public_name(draft)
        return CardTexts(
            f"Companion for {facts['target']}",
            super().card(facts).introduction,
            "A companion proposes no tokens. It reads those of a draft, and a policy decides from "
            "its distributions\nwhich of them the target checks. It changes the speed of the "
            "output and not its distribution.",
            f'draft="{shown}", companion="path/of/this/folder"',
            "companion",
        )


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
        # Acceptance of the draft, which is computed once.
        self._draft_acceptance: dict[str, float] = {}

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
        for tokens in held_out.next_tokens():
            # Distributions at temperature 0 are those at temperature 1.
            scale = torch.where(tokens.temperatures > 0, tokens.temperatures, 1.0).unsqueeze(-1)
            p = (tokens.logits / scale).softmax(dim=-1)
            c = (_first(self._companion, tokens) / scale).softmax(dim=-1)
            q = self._of_draft(tokens, scale)
            with_target = overlap(p, c)
            for temperature in sorted(set(tokens.temperatures.tolist())):
                own = tokens.temperatures == temperature
                overlaps.setdefault(temperature, []).append(with_target[own])
                if q is not None:
                    draft_overlaps.setdefault(temperature, []).append(overlap(p[own], q[own]))
                    records.setdefault(temperature, []).append(
                        _records(p[own], q[own], c[own], temperature == 0, generator)
                    )
        values = {}
        for temperature, found in sorted(overlaps.items()):
            values[f"target_overlap/T={temperature:g}"] = float(torch.cat(found).mean())
        if self._draft is not None and not self._draft_acceptance:
            accepted = held_out.acceptance(self._draft.chain_logits, self._draft.target_ids)
            self._draft_acceptance = {f"draft_{name}": value for name, value in accepted.items()}
        values |= self._draft_acceptance
        for temperature, parts in sorted(records.items()):
            with_draft = {
                "draft_target_overlap": float(torch.cat(draft_overlaps[temperature]).mean()),
                **_figures(Records.join(parts)),
            }
            values |= {f"{name}/T={temperature:g}": each for name, each in with_draft.items()}
        return values

    def _of_draft(self, tokens: NextTokens, scale: Tensor) -> Tensor | None:
        """``[n, vocab]`` distributions of the draft; ``None`` without one."""
        if self._draft is None:
            return None
        own = (_first(self._draft.chain_logits, tokens) / scale).softmax(dim=-1)
        ids = self._draft.target_ids.to(own.device)
        return torch.zeros_like(tokens.logits).index_copy_(1, ids, own)


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
        confidence=np.zeros(size, dtype=np.float32),
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
