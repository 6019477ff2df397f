"""OpenVINO GenAI with continuous batching; models are converted once and cached."""

from __future__ import annotations

from importlib.metadata import version

from .openvino_export import check_export, converted
from .protocol import Generate, Settings

# Longest number of last tokens that are looked up; the value of OpenVINO's own example.
_LONGEST_NGRAM = 3


def start(settings: Settings) -> tuple[Generate, Settings]:
    """Load the target, and the draft if there is one.

    With the method ``ngram``, drafts are looked up in the text ("prompt lookup").
    """
    for name in filter(None, (settings["draft"], settings["target"])):
        check_export(name)
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    looks_up = settings.get("method") == "ngram"
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = settings["max_batch_size"]
    precision = {"bfloat16": "bf16", "float32": "f32"}[settings["dtype"]]
    properties: Settings = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    if settings["draft"]:
        properties["draft_model"] = genai.draft_model(
            converted(settings["draft"]), "CPU", **properties
        )
    if looks_up:
        properties["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(
        converted(settings["target"]), "CPU", scheduler_config=scheduler, **properties
    )

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        config = genai.GenerationConfig()
        config.max_new_tokens = wanted["max_tokens"]
        config.ignore_eos = not wanted["stop_token_ids"]
        if wanted["stop_token_ids"]:
            config.eos_token_id = wanted["stop_token_ids"][0]
            config.stop_token_ids = set(wanted["stop_token_ids"])
        config.do_sample = wanted["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p = wanted["temperature"], wanted["top_p"]
            if wanted["top_k"]:
                config.top_k = wanted["top_k"]
            config.rng_seed = wanted["seeds"][0] if wanted["seeds"] else 0
        if "confidence_threshold" in settings:
            config.assistant_confidence_threshold = settings["confidence_threshold"]
        elif settings["draft"] or looks_up:
            config.num_assistant_tokens = settings["num_speculative_tokens"]
        if looks_up:
            config.max_ngram_size = _LONGEST_NGRAM
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        inputs = genai.TokenizedInputs(Tensor(ids), Tensor(mask))
        done = pipeline.generate(inputs, config)
        return [list(answer) for answer in done.tokens], {}

    return generate, {"version": version("openvino-genai"), "device": "cpu"}
