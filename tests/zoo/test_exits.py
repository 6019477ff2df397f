"""Exits of the bundled target give its greedy texts, alone and in a batch."""

from pathlib import Path

import pytest

from draftwise import LLM, SamplingParams
from draftwise.prompts import load_prompts

from ..stand_ins import unguarded

pytestmark = pytest.mark.slow

PROMPTS = load_prompts(Path(__file__).parents[2] / "examples" / "prompts.jsonl")[:16]
GREEDY = SamplingParams(max_tokens=32, temperature=0)


def said(speculation, max_batch_size):
    llm = LLM(
        "zoo:target", speculation, dtype="float32", max_batch_size=max_batch_size, max_model_len=512
    )
    # One by one, an eighth of the prompts takes about as long as all of them together.
    outputs = llm.generate(PROMPTS[: 2 if max_batch_size == 1 else 16], GREEDY)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    return [output.token_ids for output in outputs], accepted


@pytest.mark.parametrize("max_batch_size", [1, 16])
def test_greedy_texts_are_those_of_the_target(max_batch_size):
    expected, _ = said(None, max_batch_size)
    for draft, companion in (
        ("target:exit=2", None),
        ("target:exit=3", None),
        ("target:exit=2", "target:exit=4"),
    ):
        policy = "fixed" if companion is None else "staged"
        speculation = unguarded(draft, companion=companion, policy=policy, num_speculative_tokens=4)
        texts, accepted = said(speculation, max_batch_size)
        assert texts == expected
        assert accepted
