"""llama.cpp, called through the bindings of ``llama-cpp-python``; the target is a GGUF file."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from .protocol import Generate, Settings

_TOKENS_AT_ONCE = 512


def start(settings: Settings) -> tuple[Generate, Settings]:
    """Load the target.

    With the method ``ngram``, the class ``Llama`` of the bindings answers one prompt at a time, as
    only this class drafts. Otherwise the C library is called directly, as its own example programs
    do, because the class copies all logits to Python after each token.

    Raises:
        RuntimeError: the target is not a GGUF file that llama.cpp loads.
    """
    begin = _start_lookup if settings.get("method") == "ngram" else _start_plain
    return begin(settings), {"version": version("llama-cpp-python"), "device": "cpu"}


def _start_lookup(settings: Settings) -> Generate:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    try:
        llama = Llama(
            settings["target"],
            n_gpu_layers=0,
            n_ctx=settings["max_model_len"],
            n_batch=_TOKENS_AT_ONCE,
            n_ubatch=_TOKENS_AT_ONCE,
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=LlamaPromptLookupDecoding(
                num_pred_tokens=settings["num_speculative_tokens"]
            ),
            verbose=False,
        )
    except ValueError as error:
        raise _cannot_load(settings) from error

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        (prompt,) = prompts
        stops, answer = set(wanted["stop_token_ids"]), []
        # Otherwise the beginning of the prompt would be taken from the previous call's cache.
        llama.reset()
        if wanted["seeds"] is not None:
            llama.set_seed(wanted["seeds"][0])
        tokens = llama.generate(
            prompt,
            temp=wanted["temperature"],
            top_p=wanted["top_p"],
            top_k=wanted["top_k"],
            min_p=0.0,
            repeat_penalty=1.0,
        )
        for token in tokens:
            answer.append(int(token))
            if len(answer) == wanted["max_tokens"] or token in stops:
                break
        tokens.close()
        return [answer], {}

    return generate


def _start_plain(settings: Settings) -> Generate:
    import llama_cpp as llama

    model_options = llama.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(settings["target"].encode(), model_options)
    if not model:
        raise _cannot_load(settings)
    options = llama.llama_context_default_params()
    options.n_ctx = settings["max_model_len"] * settings["max_batch_size"]
    options.n_batch = options.n_ubatch = _TOKENS_AT_ONCE
    options.n_seq_max = settings["max_batch_size"]
    options.n_threads = options.n_threads_batch = settings["threads"]
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(_TOKENS_AT_ONCE, 0, 1)

    def sampler(wanted: Settings) -> Any:
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if not wanted["temperature"]:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
            return chain
        if wanted["top_k"]:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(wanted["top_k"]))
        for stage in (
            llama.llama_sampler_init_temp(wanted["temperature"]),
            llama.llama_sampler_init_top_p(wanted["top_p"], 1),
            llama.llama_sampler_init_dist(wanted["seeds"][0] if wanted["seeds"] else 0),
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
        stops = set(wanted["stop_token_ids"])
        answers: list[list[int]] = [[] for _ in prompts]
        for prompt, tokens in enumerate(prompts):
            for start in range(0, len(tokens), _TOKENS_AT_ONCE):
                part = list(enumerate(tokens))[start : start + _TOKENS_AT_ONCE]
                compute([(prompt, at, token, at + 1 == len(tokens)) for at, token in part])
            answers[prompt].append(llama.llama_sampler_sample(chain, context, -1))
        for count in range(1, wanted["max_tokens"]):
            running = [at for at, answer in enumerate(answers) if answer[-1] not in stops]
            if not running:
                break
            compute([(at, len(prompts[at]) + count - 1, answers[at][-1], True) for at in running])
            for row, at in enumerate(running):
                answers[at].append(llama.llama_sampler_sample(chain, context, row))
        llama.llama_sampler_free(chain)
        return answers, {}

    return generate


def _cannot_load(settings: Settings) -> RuntimeError:
    return RuntimeError(f"llama.cpp cannot load {settings['target']!r}; it reads GGUF files")
