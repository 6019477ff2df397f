"""A real model: greedy texts equal those of transformers, beyond the window of 512 tokens."""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftwise import LLM, SamplingParams

from .reference import example_texts, greedy_texts

FILE = Path(os.environ["DRAFTWISE_GEMMA"])
MAX_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    """40 prompts: 20 short ones, and 20 with a common beginning, of which most cross the window."""
    tokenizer = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    texts = example_texts()
    long = ["\n\n".join([*texts[: 4 + at], texts[at]]) for at in range(len(texts))]
    ids = [tokenizer(text).input_ids for text in [*texts, *long]]
    assert len(ids) == 40
    assert sum(len(each) > 512 for each in ids) >= 8
    return ids


@pytest.fixture(scope="module")
def expected(prompts):
    """The greedy continuations by transformers, in float32."""
    return greedy_texts(FILE, prompts, MAX_TOKENS)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


def test_the_whole_context_is_served():
    assert LLM(FILE).target.max_model_len == 32768


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("is_caching", [True, False])
def test_greedy_texts_equal_those_of_transformers(prompts, expected, is_caching, batch_size):
    llm = LLM(
        FILE,
        dtype="float32",
        max_batch_size=batch_size,
        max_model_len=2048,
        enable_prefix_caching=is_caching,
    )
    first = llm.generate(prompts, GREEDY)
    assert tokens_of(first) == expected
    assert any(output.num_cached_tokens > 512 for output in first) == is_caching
    if is_caching:
        again = llm.generate(prompts, GREEDY)
        assert tokens_of(again) == expected
        # The store holds the newest prompts, not all of them.
        assert again[-1].num_cached_tokens >= len(prompts[-1]) - 17


def test_drafts_from_the_text_do_not_change_them(prompts, expected):
    speculation = {"draft": "suffix", "policy": "fixed", "num_speculative_tokens": 8}
    drafted = LLM(FILE, speculation, "float32", max_batch_size=8, max_model_len=2048)
    outputs = drafted.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected
    assert sum(output.speculation.num_accepted for output in outputs) > 5 * len(prompts)


def test_speculation_does_not_change_them(prompts, expected):
    speculation = {"draft": f"{FILE}:int4", "policy": "fixed", "num_speculative_tokens": 3}
    drafted = LLM(FILE, speculation, "float32", max_batch_size=8, max_model_len=2048)
    outputs = drafted.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected
    assert sum(output.speculation.num_accepted for output in outputs) > 10 * len(prompts)


@pytest.mark.filterwarnings("ignore::draftwise.errors.VocabularyWarning")
def test_a_draft_of_another_family_does_not_change_them(prompts, expected):
    speculation = {"draft": "zoo:draft", "policy": "fixed", "num_speculative_tokens": 3}
    drafted = LLM(FILE, speculation, "float32", max_batch_size=8, max_model_len=2048)
    outputs = drafted.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected
    assert sum(output.speculation.num_accepted for output in outputs) > len(prompts)
