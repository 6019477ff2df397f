"""What target, draft and companion think of each position of texts that the target wrote.

In speculative decoding without an end to the draft every position of the output is put to the
test once, and the output is a text of the target. So the target's texts show all of it: with p and
q at a position and y the token that is there, y was drafted and accepted with probability
min(1, q(y)/p(y)), because min(p, q)(y) of its probability p(y) comes by acceptance and the rest by
correction. No drafting is needed, each model reads each text once, and there is no noise of
drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.sampling import LogitControls, beliefs
from draftwise.core.signals import entropy, kl_divergence, overlap, token_probabilities
from draftwise.engine.assembly import Models
from draftwise.engine.follower import Follower
from draftwise.models.attention import Segment
from draftwise.models.loading import LoadedModel

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

# How many of the largest probabilities are kept.
NUM_SORTED = 10
# Probabilities of one model that are held at once.
_MOST_PROBABILITIES = 6_000_000


class Text(NamedTuple):
    """A prompt and what the target wrote after it, as tokens."""

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Passage:
    """Some positions with whole distributions; the positions of a text are consecutive.

    Attributes:
        text: ``[n]`` number of the text.
        index: ``[n]`` position in the output, from 0.
        context: ``[n]`` tokens before it, the prompt included.
        tokens: ``[n]`` int64, what the target wrote.
        p: ``[n, vocab]`` float32, the target's distribution.
        q: ``[n, vocab]`` float32, the draft's.
        c: ``[n, vocab]`` float32, the companion's; ``None`` without one.
        greedy: the texts were written at temperature 0 (distributions are those at 1).
    """

    text: Integers
    index: Integers
    context: Integers
    tokens: Tensor
    p: Tensor
    q: Tensor
    c: Tensor | None
    greedy: bool = False


@dataclass(frozen=True)
class Positions:
    """Numbers of positions, text after text; all arrays are ``[n]`` unless said otherwise.

    Attributes:
        text: number of the text.
        index: position in the output, from 0.
        context: tokens before it.
        entropy: H(q) in nats.
        target_entropy: H(p) in nats.
        divergence: KL(q ‖ p) in nats.
        acceptance: β = Σ min(p, q), or at temperature 0 whether the likeliest tokens are the same.
        overlap: S = Σ min(q, c); 0 without companion.
        p_kept: probability that the token that is there was drafted and accepted.
        accepted: drawn with that probability.
        repeated: the token and the three before it occurred in the output before, in this order.
        draft_sorted: ``[n, 10]`` the largest probabilities of q, falling.
        target_sorted: ``[n, 10]`` the largest of p.
    """

    text: Integers
    index: Integers
    context: Integers
    entropy: Floats
    target_entropy: Floats
    divergence: Floats
    acceptance: Floats
    overlap: Floats
    p_kept: Floats
    accepted: Booleans
    repeated: Booleans
    draft_sorted: Floats
    target_sorted: Floats

    def __len__(self) -> int:
        return len(self.text)

    @property
    def cross_entropy(self) -> Floats:
        """``[n]`` H(q, p) = H(q) + KL(q ‖ p) in nats."""
        return self.entropy + self.divergence

    @classmethod
    def join(cls, parts: Sequence[Positions]) -> Positions:
        """Parts one after another."""
        columns = {
            item.name: np.concatenate([getattr(part, item.name) for part in parts])
            for item in fields(cls)
        }
        return cls(**columns)


@torch.inference_mode()
def read_texts(
    models: Models, texts: Sequence[Text], temperature: float = 1.0, top_p: float = 1.0
) -> Iterator[Passage]:
    """Let all models read the texts; passages come in the texts' order.

    Args:
        models: with a draft.
        texts: written by the target, or by anybody.
        temperature: of all models; 0 for texts that were written greedily.
        top_p: of all models.
    """
    assert models.draft is not None
    vocab_size = models.target.model.vocab_size
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    present = [m for m in (models.target, models.draft, models.companion) if m is not None]
    start = 0
    while start < len(texts):
        end, size = start, 0
        while end < len(texts) and (end == start or size * vocab_size < _MOST_PROBABILITIES):
            size += len(texts[end].tokens)
            end += 1
        part = texts[start:end]
        read = [_distributions(m, part, longest, vocab_size, temperature, top_p) for m in present]
        counts = [len(text.tokens) for text in part]
        index = np.concatenate([np.arange(count) for count in counts])
        before = np.repeat([len(text.prompt) for text in part], counts)
        yield Passage(
            text=np.repeat(np.arange(start, end), counts),
            index=index,
            context=before + index,
            tokens=torch.tensor([t for text in part for t in text.tokens]),
            p=read[0],
            q=read[1],
            c=read[2] if len(read) > 2 else None,
            greedy=temperature == 0,
        )
        start = end


def _distributions(
    model: LoadedModel,
    texts: Sequence[Text],
    capacity: int,
    vocab_size: int,
    temperature: float,
    top_p: float,
) -> Tensor:
    """``[positions, vocab]`` on the host, of all output positions of some texts."""
    known = model.model.vocab_size
    cache = model.model.new_cache(1, capacity)
    follower = Follower(model.model, cache, vocab_size)
    rows = []
    for text in texts:
        cache.clear(0)
        tokens = [*text.prompt, *text.tokens[:-1]]
        readable = [token if token < known else 0 for token in tokens]
        wanted = range(len(text.prompt) - 1, len(tokens))
        logits = model.model.forward(cache, readable, [Segment(0, 0, len(tokens))], wanted)
        assert logits is not None
        logits = follower.fit_vocabulary(logits)
        number = torch.full((len(logits),), temperature or 1.0, device=logits.device)
        controls = LogitControls(
            number,
            all_greedy=False,
            any_greedy=False,
            top_p=torch.full_like(number, top_p) if top_p < 1 else None,
        )
        rows.append(beliefs(logits, controls).cpu())
    return torch.cat(rows)


def positions_of(passages: Iterable[Passage], seed: int = 0) -> Positions:
    """The numbers of all positions.

    Args:
        passages: whole texts.
        seed: of what is drawn.
    """
    generator = np.random.default_rng(seed)
    return Positions.join([_positions(passage, generator) for passage in passages])


def _positions(passage: Passage, generator: np.random.Generator) -> Positions:
    p, q, tokens = passage.p, passage.q, passage.tokens
    if passage.greedy:
        agrees = q.argmax(dim=1) == p.argmax(dim=1)
        acceptance = p_kept = agrees.float()
    else:
        acceptance = overlap(q, p)
        p_y, q_y = token_probabilities(p, tokens), token_probabilities(q, tokens)
        p_kept = (q_y / p_y.clamp(min=1e-30)).clamp(max=1.0)
    kept = _numbers(p_kept)
    size = min(NUM_SORTED, p.shape[1])
    return Positions(
        text=passage.text,
        index=passage.index,
        context=passage.context,
        entropy=_numbers(entropy(q)).clip(min=0.0),
        target_entropy=_numbers(entropy(p)).clip(min=0.0),
        divergence=_numbers(kl_divergence(q, p)).clip(min=0.0),
        acceptance=_numbers(acceptance),
        overlap=np.zeros(len(kept)) if passage.c is None else _numbers(overlap(q, passage.c)),
        p_kept=kept,
        accepted=generator.random(len(kept)) < kept,
        repeated=repeated(passage.text, tokens.numpy()),
        draft_sorted=_numbers(q.topk(size, dim=1).values),
        target_sorted=_numbers(p.topk(size, dim=1).values),
    )


def repeated(text: Integers, tokens: Integers, length: int = 4) -> Booleans:
    """``[n]`` whether each token and those before it occurred before in its text's output.

    Args:
        text: ``[n]`` number of each token's text, ascending.
        tokens: ``[n]``.
        length: of what counts as a repetition, in tokens.
    """
    result = np.zeros(len(tokens), dtype=bool)
    seen: set[tuple[int, ...]] = set()
    for at in range(len(tokens)):
        first = at - length + 1
        if at and text[at] != text[at - 1]:
            seen.clear()
        if first >= 0 and text[first] == text[at]:
            gram = tuple(tokens[first : at + 1].tolist())
            result[at] = gram in seen
            seen.add(gram)
    return result


def _numbers(values: Tensor) -> Floats:
    return values.double().cpu().numpy()
