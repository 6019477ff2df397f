"""A hundred short prompts in batches: exits and heads say what the target says at temperature 0.

Requests end in most steps, often several in one, and others take their cache slots. Sampled
requests are between them, so that the acceptance law runs, by token and by block.
"""

import functools

import pytest
import torch

from draftwise import SamplingParams
from draftwise.policies.step_times import SCORED

from ..stand_ins import vary_choices
from . import exits, heads
from .assembly import generate, token_ids

NUM_PROMPTS, NUM_TOKENS = 100, 12
# Of each ten requests, the last one is sampled. It lasts longer than the others.
SAMPLED = range(9, NUM_PROMPTS + 9, 10)


def short_prompts():
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 10, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(0, 12, (count,), generator=generator).tolist() for count in lengths]


PROMPTS = short_prompts()
DRAFTS = {
    "exit": (exits.engine_with_exit, exits.TARGET),
    "head": (heads.engine_with_head, heads.TARGET),
}


@pytest.fixture(scope="module")
def greedy_texts(models):
    """The texts that each draft must lead to.

    They are computed by Hugging Face's own passes over all prompts, padded at the end.
    """

    @functools.cache
    @torch.no_grad()
    def of(draft):
        reference = models.reference(DRAFTS[draft][1])
        texts = [list(prompt) for prompt in PROMPTS]
        for _ in range(NUM_TOKENS):
            width = max(map(len, texts))
            ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
            logits = reference(input_ids=ids, use_cache=False).logits
            for text, row in zip(texts, logits, strict=True):
                text.append(int(row[len(text) - 1].argmax()))
        return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]

    return of


def max_tokens(at):
    """Length of the text of a prompt."""
    return 3 + 3 * (at % 4)


def work():
    """All prompts, greedy, and sampled requests between them."""
    prompts = list(PROMPTS)
    params = [SamplingParams(max_tokens=max_tokens(at), temperature=0) for at in range(NUM_PROMPTS)]
    for at in SAMPLED:
        prompts.insert(at, [at % 12, 3])
        params.insert(at, SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, seed=at))
    return prompts, params


@pytest.mark.covering("draft", "policy", "verification")
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("policy", ["fixed", "sv", "adaptive"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_are_the_target_s(models, greedy_texts, draft, policy, verification, monkeypatch):
    """The companion of ``sv`` is a deeper exit, and for a head it is a model."""
    create, target = DRAFTS[draft]
    # Few tokens of the head are right. By their prices, policies would give it up.
    vary_choices(monkeypatch, [4, SCORED + 4, SCORED + 3], [0.05, 0.3])
    engine = create(
        models,
        target,
        policy=policy,
        verification=verification,
        num_speculative_tokens=4,
        max_batch_size=8,
    )
    outputs = generate(engine, *work())
    greedy = [output for at, output in enumerate(outputs) if at not in SAMPLED]
    assert token_ids(greedy) == [t[: max_tokens(at)] for at, t in enumerate(greedy_texts(draft))]
    accepted = sum(output.speculation.num_accepted for output in greedy)
    verified = sum(output.speculation.num_verified for output in greedy)
    assert 20 < accepted < verified
    assert sum(output.speculation.num_accepted for output in outputs) > accepted
