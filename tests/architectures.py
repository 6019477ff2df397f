"""Tiny models of all architectures that are compared with transformers beyond their windows."""

import functools

import torch

from .tiny_models import Recipe

WINDOW = 8
CONTEXT = 200
NUM_TOKENS = 60


def recipe(family, **config):
    return Recipe(family, vocab=16, context=CONTEXT, seed=3, config=config)


WITH_WINDOWS = {
    "mistral": recipe("mistral", sliding_window=WINDOW),
    "phi3": recipe("phi3", sliding_window=WINDOW, head_dim=8, partial_rotary_factor=0.5),
    **{
        family: recipe(family, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1)
        for family in ("qwen2", "qwen3")
    },
    **{family: recipe(family) for family in ("gemma2", "gemma3_text", "gpt_oss", "olmo3")},
}
WITHOUT_WINDOWS = {
    **{
        family: recipe(family)
        for family in ("llama", "gemma", "olmo2", "granite", "qwen3_moe", "mixtral")
    },
    "smollm3": recipe("smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
}
ALL = {**WITH_WINDOWS, **WITHOUT_WINDOWS}
# Hugging Face's modules compute these.
AS_MODULES = {"gpt_oss", "qwen3_moe", "mixtral"}
DESCRIBED = {family: each for family, each in ALL.items() if family not in AS_MODULES}
PROMPTS = [[(7 * i + j * j) % 16 for j in range(1 + 8 * i)] for i in range(16)]


@functools.cache
def continuation(models, family, index):
    """The greedy continuation of a prompt by transformers."""
    ids = torch.tensor([PROMPTS[index]])
    with torch.inference_mode():
        text = models.reference(ALL[family]).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
    return text[0, ids.shape[1] :].tolist()
