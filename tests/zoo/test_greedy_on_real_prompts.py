"""The bundled target generates the same text as in ``transformers``, on real benchmark prompts.

The evaluation files are not part of the project. They are looked for in the folder named by
``DRAFTWISE_DATA`` or in ``../shared/data``.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwise import LLM, SamplingParams, zoo
from draftwise.prompts import load_prompts

from ..stand_ins import unguarded

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("DRAFTWISE_DATA", ROOT.parent / "shared" / "data"))
NUM_PROMPTS, MAX_TOKENS, CONTEXT = 40, 128, 1024
# File, and whether its prompts are questions for the chat template.
FILES = {"gsm8k_test": True, "humaneval": False, "spec_bench": True}


@pytest.fixture(scope="module")
def llms():
    """One target in float32, decoding one prompt at a time and sixteen."""
    speculation = unguarded(draft="zoo:draft", num_speculative_tokens=4, policy="fixed")
    return {
        size: LLM(
            "zoo:target", speculation, dtype="float32", max_batch_size=size, max_model_len=CONTEXT
        )
        for size in (1, 16)
    }


@pytest.fixture(scope="module")
def reference():
    model = AutoModelForCausalLM.from_pretrained(zoo.resolve("zoo:target"), dtype=torch.float32)
    return model.eval()


def fitting_prompts(name, tokenizer):
    """The first prompts of a file that leave room for the answer, as text."""
    file = DATA / f"{name}.jsonl"
    if not file.is_file():
        message = f"evaluation file {file.name} not found; set DRAFTWISE_DATA to its folder"
        pytest.skip(message)
    texts = load_prompts(file)
    if FILES[name]:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    return [text for text in texts if len(tokenizer(text).input_ids) < CONTEXT - MAX_TOKENS][
        :NUM_PROMPTS
    ]


@pytest.mark.parametrize("name", FILES)
def test_greedy_text_equals_that_of_generate(name, llms, reference):
    prompts = fitting_prompts(name, llms[1].target.tokenizer)
    assert len(prompts) == NUM_PROMPTS
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    single = llms[1].generate(prompts, params)
    batched = llms[16].generate(prompts, params)
    accepted = 0
    for one, many in zip(single, batched, strict=True):
        ids = torch.tensor([one.prompt_token_ids])
        with torch.inference_mode():
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        assert one.token_ids == many.token_ids == expected[0, ids.shape[1] :].tolist()
        accepted += one.speculation.num_accepted
    assert accepted > 0
