"""A policy that uses every signal, and a run that records the signals."""

from dataclasses import dataclass, replace

import torch

from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.request import Request
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition

from ..stand_ins import unguarded
from .exact import process


class Recorder(Policy):
    """Drafts and verifies random lengths that do not depend on any token."""

    name = "recorder"
    summary = "records its inputs"
    source = "tests"
    signals = frozenset(Signal)

    def __init__(self, context, asks=lambda step: True, longest_verified=7):
        super().__init__(context)
        self.generator = torch.Generator().manual_seed(0)
        self.asks = asks
        self.longest_verified = longest_verified
        self.num_steps = 0
        self.positions: list[DraftPosition] = []
        self.seen: tuple[Draft, CompanionScores | None] | None = None

    def _draw(self, count, high):
        return torch.randint(0, high, (count,), generator=self.generator).tolist()

    def plan_drafts(self, requests):
        self.positions, self.seen = [], None
        self.num_steps += 1
        drawn = self._draw(len(requests), self.num_speculative_tokens + 1)
        return DraftPlan(drawn, scored=self.asks(self.num_steps))

    def keep_drafting(self, position):
        self.positions.append(position)
        return torch.tensor(self._draw(len(position.requests), 6)) > 0

    def select(self, draft, companion_scores):
        self.seen = draft, companion_scores
        drawn = self._draw(len(draft.lengths), self.longest_verified + 1)
        lengths = [min(n, length) for n, length in zip(drawn, draft.lengths, strict=True)]
        proposals = draft.probs
        if proposals is not None:
            cut = torch.arange(proposals.shape[1]) >= torch.tensor(lengths).unsqueeze(1)
            proposals = proposals.masked_fill(cut.unsqueeze(2), 0.0)
        return Plan(draft.tokens, tuple(lengths), proposals)


@dataclass(frozen=True)
class Seen:
    """One request in one step.

    Attributes:
        request: the request.
        tokens: its tokens before the step.
        drafted: what was drafted.
        entropy, q_drawn, q: the draft's signals, ``[width]``, ``[width]``, ``[width, vocab]``.
        overlap, agreement, c: the companion's, or ``None`` if it was not used.
    """

    request: Request
    tokens: list[int]
    drafted: list[int]
    entropy: torch.Tensor
    q_drawn: torch.Tensor
    q: torch.Tensor
    overlap: torch.Tensor | None
    agreement: torch.Tensor | None
    c: torch.Tensor | None


class RecordedEngine:
    """An engine whose policy is a :class:`Recorder`.

    Attributes:
        engine: the engine.
        recorder: its policy.
        seen: all drafts, step by step.
    """

    def __init__(self, target, draft, companion, gamma=4, options=None, **settings):
        self.recorder = Recorder(PolicyContext(gamma, has_companion=True), **settings)
        config = unguarded("d", policy="recorder", num_speculative_tokens=gamma)
        options = EngineOptions(**(options or {}))
        models = Models(target, draft, companion)
        self.engine = Engine(models, config, options, policy=self.recorder)
        self.seen: list[Seen] = []

    def step(self):
        """Take one step and add its drafts to ``seen``."""
        scheduler = self.engine._scheduler
        known = [*scheduler._waiting, *scheduler._running.values()]
        before = {request.request_id: list(request.tokens) for request in known}
        batches = []
        next_batch = scheduler.next_batch
        scheduler.next_batch = lambda *a: batches.append(next_batch(*a)) or batches[-1]
        try:
            self.engine.step()
        finally:
            del scheduler.next_batch
        draft, companion_scores = self.recorder.seen
        drafted = draft.tokens.tolist()
        for index, request in enumerate(batches[0].generating):
            length = draft.lengths[index]
            if not draft.tokens.shape[1]:
                continue
            signals = draft.signals
            self.seen.append(
                Seen(
                    request,
                    before[request.request_id],
                    drafted[index][:length],
                    signals.entropy[index],
                    signals.token_probs[index],
                    signals.draft_probs[index].clone(),
                    None if companion_scores is None else companion_scores.overlap[index],
                    None if companion_scores is None else companion_scores.agreement[index],
                    None if companion_scores is None else companion_scores.probs[index],
                )
            )

    def run(self, prompts, params, per_step=3):
        """Serve requests that arrive a few at a time. Returns their outputs."""
        requests = []
        while len(requests) < len(prompts) or self.engine.num_unfinished:
            for index in range(len(requests), min(len(requests) + per_step, len(prompts))):
                requests.append(self.engine.add(None, prompts[index], params[index]))
            self.step()
        return [request.output() for request in requests]


@torch.no_grad()
def expected_beliefs(model, seen, width):
    """``[drafted, width]`` a model's distribution at each drafted position, from a fresh forward.

    Args:
        model: as transformers runs it.
        seen: the request and what was drafted.
        width: of the target's logits. A token that the model does not have is read as token 0.
    """
    ids = [*seen.tokens, *seen.drafted]
    size = model.config.vocab_size
    readable = torch.tensor([[token if token < size else 0 for token in ids]])
    logits = model(input_ids=readable).logits[0, len(seen.tokens) - 1 : -1, :width]
    logits = torch.nn.functional.pad(logits, (0, width - logits.shape[1]), value=-torch.inf)
    params = seen.request.params
    params = replace(params, temperature=params.temperature or 1.0)
    rows = []
    for index, row in enumerate(logits):
        context = ids[: len(seen.tokens) + index]
        output = context[seen.request.num_prompt_tokens :]
        output = torch.tensor([output], dtype=torch.long)
        rows.append(process(row.unsqueeze(0), torch.tensor([context]), output, params))
    return torch.cat(rows) if rows else torch.zeros(0, width)
