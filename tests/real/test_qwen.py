"""Real models of 1.5 and 0.5 billion parameters: greedy texts equal those of transformers."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from draftwise import LLM, SamplingParams

TARGET, DRAFT = (Path(os.environ[f"DRAFTWISE_QWEN_{role}"]) for role in ("TARGET", "DRAFT"))
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
SPECULATION = {"draft": str(DRAFT), "policy": "fixed", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def outputs():
    """Texts of 20 prompts in batches of 8, with the smaller model as the draft."""
    texts = [json.loads(line)["prompt"] for line in EXAMPLES.read_text().splitlines()]
    assert len(texts) == 20
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        llm = LLM(TARGET, SPECULATION, dtype="float32", max_batch_size=8, max_model_len=1024)
    assert not [each for each in shown if "vocabulary" in str(each.message)]
    return llm.generate(texts, GREEDY)


def test_greedy_texts_equal_those_of_transformers(outputs):
    model = AutoModelForCausalLM.from_pretrained(
        TARGET.parent,
        gguf_file=TARGET.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        text = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            min_new_tokens=MAX_TOKENS,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        assert list(output.token_ids) == text[0, len(prompt) :].tolist()


def test_tokens_of_the_draft_are_accepted(outputs):
    drafted = sum(each.speculation.num_drafted for each in outputs)
    accepted = sum(each.speculation.num_accepted for each in outputs)
    assert accepted > drafted / 3
