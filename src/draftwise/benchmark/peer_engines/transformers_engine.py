"""Hugging Face Transformers: ``generate`` at batch size 1, continuous batching at larger ones."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from .protocol import Generate, Settings


def start(settings: Settings) -> tuple[Generate, Settings]:
    """Load the target, and the draft if there is one.

    With the method ``ngram``, ``generate`` looks drafts up in the text ("prompt lookup").
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, set_seed
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(settings["threads"])

    def load(name: str) -> Any:
        dtype = getattr(torch, settings["dtype"])
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()

    model = load(settings["target"])
    # Its sampling parameters would be used where a request leaves one out.
    model.generation_config = GenerationConfig()
    draft = load(settings["draft"]) if settings["draft"] else None
    lookup = {}
    if settings.get("method") == "ngram":
        lookup["prompt_lookup_num_tokens"] = settings["num_speculative_tokens"]
    # Every call allocates a new cache, so limit its size; the default fills the memory.
    pages = settings["max_batch_size"] * -(-settings["max_model_len"] // 256) + 8
    batching = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512)

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        # A top-k of 0 is no limit; without a value, transformers samples from the best 50 tokens.
        sampling = {name: wanted[name] for name in ("temperature", "top_p", "top_k")}
        config = GenerationConfig(
            max_new_tokens=wanted["max_tokens"],
            do_sample=wanted["temperature"] > 0,
            eos_token_id=wanted["stop_token_ids"] or -1,
            pad_token_id=0,
            **(sampling if wanted["temperature"] > 0 else {}),
            **lookup,
        )
        if wanted["seeds"] is not None:
            set_seed(wanted["seeds"][0])
        if len(prompts) == 1:
            ids = torch.tensor(prompts)
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    assistant_model=draft,
                )
            return [output[0, ids.shape[1] :].tolist()], {}
        # Continuous batching reuses tensors between calls, which inference mode does not permit.
        with torch.no_grad():
            done = model.generate_batch(
                inputs=prompts,
                generation_config=config,
                continuous_batching_config=batching,
                warmup=False,
            )
        order = sorted(done, key=lambda name: int(name.rsplit("_", 1)[-1]))
        return [list(done[name].generated_tokens) for name in order], {}

    versions = {"version": version("transformers"), "torch": version("torch")}
    return generate, {**versions, "device": "cpu"}
