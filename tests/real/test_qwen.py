"""Real models of 1.5 and 0.5 billion parameters: greedy texts equal those of transformers."""

import os
import warnings
from pathlib import Path

import pytest

from draftwise import LLM, SamplingParams

from .reference import example_texts, greedy_texts

TARGET, DRAFT = (Path(os.environ[f"DRAFTWISE_QWEN_{role}"]) for role in ("TARGET", "DRAFT"))
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
SPECULATION = {"draft": str(DRAFT), "policy": "fixed", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def outputs():
    """Texts of 20 prompts in batches of 8, with the smaller model as the draft."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        llm = LLM(TARGET, SPECULATION, dtype="float32", max_batch_size=8, max_model_len=1024)
    assert not [each for each in shown if "vocabulary" in str(each.message)]
    return llm.generate(example_texts(), GREEDY)


def test_greedy_texts_equal_those_of_transformers(outputs):
    prompts = [list(output.prompt_token_ids) for output in outputs]
    expected = greedy_texts(TARGET, prompts, MAX_TOKENS)
    assert [list(output.token_ids) for output in outputs] == expected


def test_tokens_of_the_draft_are_accepted(outputs):
    drafted = sum(each.speculation.num_drafted for each in outputs)
    accepted = sum(each.speculation.num_accepted for each in outputs)
    assert accepted > drafted / 3
