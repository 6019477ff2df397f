"""Models whose modules do not pass arguments on to their attention are served by these modules."""

import pytest
import torch
import transformers

from draftwise import LLM, SamplingParams

from .loading_tools import tiny

PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7, 1]]


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("StableLm", {}),
        ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
        ("Nemotron", {}),
    ],
)
def test_texts_are_those_of_transformers(tmp_path, class_name, settings):
    folder = tiny(tmp_path, class_name, **settings)
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = LLM(folder, {"method": "ngram"}, dtype="float32").generate(PROMPTS, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert [*prompt, *output.token_ids] == expected[0].tolist()
