"""Greedy texts of a GGUF file as transformers computes them with expanded weights."""

import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

_EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def example_texts():
    """The 20 prompts of the examples."""
    texts = [json.loads(line)["prompt"] for line in _EXAMPLES.read_text().splitlines()]
    assert len(texts) == 20
    return texts


def greedy_texts(file, prompts, max_tokens):
    """The greedy continuations of prompts, in float32.

    Args:
        file: path of the GGUF file.
        prompts: token ids of each prompt.
        max_tokens: length of each continuation; end tokens do not end it.
    """
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    # A least length would forbid the end tokens, which the model may write here.
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        texts.append(output[0, len(prompt) :].tolist())
    return texts
