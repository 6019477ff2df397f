"""The bundled hybrid: its texts with every kind of draft, and those of the inflated one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwise import LLM, SamplingParams, zoo
from draftwise.zoo import bundled

from ..stand_ins import unguarded

pytestmark = pytest.mark.slow

PROMPTS = [
    "def is_prime(n):",
    "Question: Tom has 3 boxes with 12 pens each. He gives away 7. How many are left?\nAnswer:",
    "class Stack:\n    def __init__(self):",
]
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
# The least share of the drafted tokens that is accepted, at three tokens per draft.
ACCEPTANCE = 0.25


@pytest.fixture(scope="module")
def hybrid():
    return LLM("zoo:hybrid", dtype="float32", max_batch_size=4, max_model_len=128)


@pytest.fixture(scope="module")
def expected(hybrid):
    """The texts that transformers generates, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(zoo.resolve("zoo:hybrid"), dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        tokens = list(hybrid.tokenize(prompt))
        length = len(tokens)
        with torch.inference_mode():
            for _ in range(GREEDY.max_tokens):
                logits = model.eval()(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        texts.append(tokens[length:])
    return texts


@pytest.mark.parametrize("draft", [None, "mtp", "suffix", ["suffix", "mtp"], "zoo:draft"])
def test_texts_are_those_of_transformers(hybrid, expected, draft):
    llm = hybrid
    if draft is not None:
        config = unguarded(draft, policy="fixed", num_speculative_tokens=3)
        llm = hybrid.with_speculation(config)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    if draft is None:
        return
    drafted = sum(output.speculation.num_drafted for output in outputs)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    assert drafted > 0
    if draft in ("mtp", "zoo:draft"):
        assert accepted >= ACCEPTANCE * drafted


def test_the_inflated_hybrid_drafts_and_accepts_the_same(hybrid, tmp_path, monkeypatch):
    # The kernels stay in the user's cache, as compiling them takes minutes.
    monkeypatch.setattr(bundled, "cache_folder", lambda: tmp_path)
    inflated = LLM("zoo:hybrid@40m", dtype="float32", max_batch_size=4, max_model_len=128)
    config = unguarded("mtp", policy="fixed", num_speculative_tokens=3)
    counts = []
    for llm in (hybrid, inflated):
        outputs = llm.with_speculation(config).generate(PROMPTS, GREEDY)
        counts.append(
            [(o.token_ids, o.speculation.num_drafted, o.speculation.num_accepted) for o in outputs]
        )
    assert counts[0] == counts[1]
