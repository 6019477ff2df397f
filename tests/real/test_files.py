"""GGUF files of your own: greedy texts in float32 equal those of transformers."""

import os
from pathlib import Path

import pytest

from draftwise import LLM, SamplingParams

from .reference import example_texts, greedy_texts

FILES = [Path(each) for each in os.environ["DRAFTWISE_GGUF"].split(os.pathsep)]
MAX_TOKENS = 24


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_greedy_texts_equal_those_of_transformers(file):
    llm = LLM(file, dtype="float32", max_batch_size=8, max_model_len=1024)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(example_texts(), params)
    llm.close()
    prompts = [list(output.prompt_token_ids) for output in outputs]
    expected = greedy_texts(file, prompts, MAX_TOKENS)
    assert [list(output.token_ids) for output in outputs] == expected
