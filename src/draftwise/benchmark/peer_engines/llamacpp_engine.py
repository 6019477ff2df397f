"""llama.cpp, called through the bindings of ``llama-cpp-python``; models are GGUF files."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from .protocol import Generate, Settings

_TOKENS_AT_ONCE = 512
# Defaults of llama.cpp's programs: the longest draft, the lowest probability of a drafted token,
# and the number of tokens over which this probability is normalised.
_LONGEST_DRAFT, _LOWEST_PROBABILITY, _DRAFT_TOP_K = 16, 0.75, 10


def start(settings: Settings) -> tuple[Generate, Settings]:
    """Load the models.

    With the method ``ngram``, the class ``Llama`` of the bindings answers one prompt at a time, as
    only this class looks drafts up. Otherwise the C library is called directly, as its own example
    programs do, because the class copies all logits to Python after each token. The library has no
    function for speculation with a draft model. Here this follows llama.cpp's programs: the draft
    model writes its most likely tokens while it is sure of them, and a drafted token is accepted
    if the target samples the same one.

    Raises:
        RuntimeError: a model is not a GGUF file that llama.cpp loads.
    """
    begin = _start_plain
    if settings.get("method") == "ngram":
        begin = _start_lookup
    elif settings["draft"]:
        begin = _start_draft
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
        raise _cannot_load(settings["target"]) from error

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


class _Model:
    """A model with a context for ``sequences`` prompts at once."""

    def __init__(self, path: str, settings: Settings, sequences: int) -> None:
        import llama_cpp

        self._library = library = llama_cpp
        model_options = library.llama_model_default_params()
        model_options.n_gpu_layers = 0
        model = library.llama_model_load_from_file(path.encode(), model_options)
        if not model:
            raise _cannot_load(path)
        options = library.llama_context_default_params()
        options.n_ctx = settings["max_model_len"] * sequences
        options.n_batch = options.n_ubatch = _TOKENS_AT_ONCE
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = settings["threads"]
        self._context = library.llama_init_from_model(model, options)
        self._batch = library.llama_batch_init(_TOKENS_AT_ONCE, 0, 1)
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def compute(self, inputs: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens, given as prompt, position, token and whether logits are needed."""
        batch = self._batch
        batch.n_tokens = len(inputs)
        for at, (prompt, position, token, needs_logits) in enumerate(inputs):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, needs_logits
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, prompt
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def compute_text(self, prompt: int, tokens: list[int], start: int = 0) -> None:
        """Compute the tokens of a text from a position on, with the logits of the last one."""
        for at in range(start, len(tokens), _TOKENS_AT_ONCE):
            part = list(enumerate(tokens))[at : at + _TOKENS_AT_ONCE]
            self.compute([(prompt, i, token, i + 1 == len(tokens)) for i, token in part])

    def forget(self, prompt: int, position: int) -> None:
        """Remove a prompt's tokens from a position on."""
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_seq_rm(memory, prompt, position, -1)

    def sampler(self, wanted: Settings) -> Any:
        """Sampler of the settings of a request; free it with :meth:`free`."""
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        stages = [library.llama_sampler_init_greedy()]
        if wanted["temperature"]:
            stages = [library.llama_sampler_init_top_k(wanted["top_k"])] if wanted["top_k"] else []
            stages += [
                library.llama_sampler_init_temp(wanted["temperature"]),
                library.llama_sampler_init_top_p(wanted["top_p"], 1),
                library.llama_sampler_init_dist(wanted["seeds"][0] if wanted["seeds"] else 0),
            ]
        for stage in stages:
            library.llama_sampler_chain_add(chain, stage)
        return chain

    def free(self, chain: Any) -> None:
        self._library.llama_sampler_free(chain)

    def sample(self, chain: Any, row: int) -> int:
        """Draw a token from the logits of a row of the last pass; -1 is the last row."""
        return int(self._library.llama_sampler_sample(chain, self._context, row))

    def most_likely(self) -> tuple[int, float]:
        """The most likely token of the last row, and its probability among the best ones."""
        import numpy as np

        address = self._library.llama_get_logits_ith(self._context, -1)
        logits = np.ctypeslib.as_array(address, (self.vocabulary,))
        best = logits[np.argpartition(logits, -_DRAFT_TOP_K)[-_DRAFT_TOP_K:]]
        return int(logits.argmax()), float(1 / np.exp(best - best.max()).sum())


def _start_plain(settings: Settings) -> Generate:
    model = _Model(settings["target"], settings, settings["max_batch_size"])

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        model.forget(-1, 0)
        chain = model.sampler(wanted)
        stops = set(wanted["stop_token_ids"])
        answers: list[list[int]] = [[] for _ in prompts]
        for prompt, tokens in enumerate(prompts):
            model.compute_text(prompt, tokens)
            answers[prompt].append(model.sample(chain, -1))
        for count in range(1, wanted["max_tokens"]):
            running = [at for at, answer in enumerate(answers) if answer[-1] not in stops]
            if not running:
                break
            model.compute(
                [(at, len(prompts[at]) + count - 1, answers[at][-1], True) for at in running]
            )
            for row, at in enumerate(running):
                answers[at].append(model.sample(chain, row))
        model.free(chain)
        return answers, {}

    return generate


def _start_draft(settings: Settings) -> Generate:
    target = _Model(settings["target"], settings, 1)
    draft = _Model(settings["draft"], settings, 1)
    if target.vocabulary < draft.vocabulary:
        raise RuntimeError("the draft model has more tokens than the target")

    def write_draft(text: list[int], known: int, most: int) -> list[int]:
        """Drafted tokens after a text of which the draft model has computed ``known`` tokens."""
        draft.compute_text(0, text, known)
        drafted: list[int] = []
        while len(drafted) < most:
            token, probability = draft.most_likely()
            if probability < _LOWEST_PROBABILITY:
                break
            drafted.append(token)
            if len(drafted) < most:
                draft.compute([(0, len(text) + len(drafted) - 1, token, True)])
        return drafted

    def generate(prompts: list[list[int]], wanted: Settings) -> tuple[list[list[int]], Settings]:
        (prompt,) = prompts
        stops, most = set(wanted["stop_token_ids"]), wanted["max_tokens"]
        chain = target.sampler(wanted)
        target.forget(0, 0)
        draft.forget(0, 0)
        target.compute_text(0, prompt)
        text, known = [*prompt, target.sample(chain, -1)], 0
        counts = {"drafted": 0, "accepted": 0}
        end = len(prompt) + most
        while len(text) < end and text[-1] not in stops:
            drafted = write_draft(text, known, min(_LONGEST_DRAFT, end - len(text) - 1))
            start = len(text) - 1
            rows = [text[-1], *drafted]
            target.compute([(0, start + row, token, True) for row, token in enumerate(rows)])
            for row in range(len(rows)):
                text.append(target.sample(chain, row))
                wrong = row == len(drafted) or text[-1] != drafted[row]
                if wrong or text[-1] in stops:
                    break
            accepted = len(text) - 2 - start
            counts["drafted"] += len(drafted)
            counts["accepted"] += accepted
            # The last token was not computed by the target. The draft model has not computed the
            # last drafted token either.
            target.forget(0, len(text) - 1)
            known = min(len(text) - 1, start + max(len(drafted), 1))
            draft.forget(0, known)
        target.free(chain)
        return [text[len(prompt) :]], counts

    return generate


def _cannot_load(path: str) -> RuntimeError:
    return RuntimeError(f"llama.cpp cannot load {path!r}; it reads GGUF files")
