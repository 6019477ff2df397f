"""The entry point for offline inference: load models once, then generate for many prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from os import PathLike
from typing import Any, NamedTuple

import torch

from draftwise.building import EngineBuilder
from draftwise.devices import resolve_device
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.call import Call
from draftwise.engine.engine import Engine
from draftwise.engine.memory import cache_bytes
from draftwise.engine.parallel.build import ParallelOptions
from draftwise.engine.request import Request
from draftwise.engine.suffix.loading import save_corpus
from draftwise.errors import ClosedError, DraftwiseError
from draftwise.models.loading import LoadedModel
from draftwise.models.memory import return_free_memory
from draftwise.outputs import FinishReason, RequestOutput, StreamPiece
from draftwise.params import SamplingParams
from draftwise.prompts import Prompt, as_list, one_per_prompt, tokenize
from draftwise.speculation import RequestSpeculation, SpeculationConfig
from draftwise.values import path_name

Speculations = RequestSpeculation | Sequence[RequestSpeculation] | None


class _Parts(NamedTuple):
    """Objects that an ``LLM`` owns until it is closed."""

    builder: EngineBuilder
    engine: Engine
    models: Models


class LLM:
    """A target model with an optional draft model for speculative decoding.

    Safe to call from several threads. Requests of all threads run in one batch, so a step taken by
    one thread advances the requests of every thread. An exception in one thread ends only the
    requests of that thread. If a step fails, all unfinished requests end with an
    :class:`~draftwise.errors.EngineError`.

    Attributes:
        target: the loaded target model.
        draft: the loaded draft model, if any.
        companion: the loaded companion model, if any.
        speculation: speculation settings; ``None`` for target-only decoding.
        max_chunk_tokens: maximum number of prompt tokens processed per step.
        engine: the engine that runs the requests.
    """

    def __init__(
        self,
        target: str | PathLike[str],
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_batch_size: int = 32,
        max_model_len: int | None = None,
        *,
        max_chunk_tokens: int = 512,
        cache_gib: float | None = None,
        enable_prefix_caching: bool = True,
        trust_remote_code: bool = False,
        overlap: bool | None = None,
        draft_replicas: int = 1,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        """Load the models.

        Args:
            target: a folder (a string or a path), a hub id or a zoo name such as
                ``"zoo:target"``. The suffix ``:int8`` quantises the weights of the linear layers to
                8 bits, which halves the size and changes the target distribution.
            speculation: speculation settings; ``None`` for target-only decoding. A mapping may use
                vLLM's key names.
            dtype: ``"auto"``, ``"bfloat16"``, ``"float16"`` or ``"float32"``, or a
                :class:`torch.dtype`. ``"auto"`` is bfloat16, or float32 where that is faster.
            device: ``"auto"``, ``"cpu"`` or ``"cuda"``, or a :class:`torch.device`.
            max_batch_size: maximum number of requests that run at once; further requests wait.
            max_model_len: maximum number of tokens of a prompt and its output together; ``None``
                for the context length of the target, or for what fits half of the free memory.
            max_chunk_tokens: maximum number of prompt tokens processed per step.
            cache_gib: size of the KV cache in GiB; ``None`` for half of the free memory.
            enable_prefix_caching: keep the keys and values of texts, so that requests that begin
                with the same tokens do not compute them again. They use up to a quarter of the KV
                cache's memory. Without effect with ``draft_replicas``.
            trust_remote_code: allow models to run code from their repositories.
            overlap: draft for one half of the batch while the target verifies the other half;
                ``None`` decides by the latency profile, which must contain the interference of the
                models (``draftwise profile-latency --interference``).
            draft_replicas: number of processes that draft. Each process has its own draft and
                companion and drafts for its share of the batch. On CUDA, replica ``i`` runs on
                device ``i``.
            on_status: called at the beginning of each operation that takes seconds with a
                description such as ``"loading zoo:target"``.

        Raises:
            DraftwiseError: a typed error that names the invalid argument.
        """
        self.speculation = SpeculationConfig.of(speculation)
        where = resolve_device(device)
        options = EngineOptions(
            max_batch_size, max_chunk_tokens, cache_bytes(cache_gib, where), enable_prefix_caching
        )
        builder = EngineBuilder(
            target,
            dtype,
            where,
            max_model_len,
            trust_remote_code,
            on_status,
            options,
            ParallelOptions(overlap, draft_replicas),
            fits_context=cache_gib is None,
        )
        self.max_chunk_tokens = options.max_chunk_tokens
        self._open_parts: _Parts | None = _Parts(builder, *builder.build(self.speculation))

    def with_speculation(self, speculation: SpeculationConfig | Mapping[str, Any] | None) -> LLM:
        """Create another ``LLM`` with other speculation settings on the same loaded target.

        The two share weights, but neither caches nor requests.

        Raises:
            InvalidParameterError: the settings are invalid.
        """
        builder, other = self._parts.builder, copy(self)
        other.speculation = SpeculationConfig.of(speculation)
        other._open_parts = _Parts(builder, *builder.build(other.speculation))
        return other

    def change_speculation(self, **changes: Any) -> None:
        """Change speculation settings from the next step on, also for running requests.

        Args:
            changes: new values of ``policy``, ``policy_options``, ``num_speculative_tokens`` or
                ``lenience``.

        Raises:
            InvalidParameterError: see :meth:`draftwise.engine.engine.Engine.change_speculation`.
        """
        engine = self.engine
        with engine.turns:
            self.speculation = engine.change_speculation(**changes)

    def load_models(self, speculation: SpeculationConfig) -> Models:
        """Load the draft and the companion of a configuration.

        Models that an engine of this target uses are shared.

        Returns:
            The models, including the target.

        Raises:
            DraftwiseError: a model cannot be loaded, or its vocabulary differs from the target's.
        """
        return self._parts.builder.load_models(speculation)

    @property
    def target(self) -> LoadedModel:
        """The loaded target model."""
        return self._parts.models.target

    @property
    def draft(self) -> LoadedModel | None:
        """The loaded draft model, if any."""
        return self._parts.models.draft

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of the draft model and of proposers without a model; empty without speculation."""
        return () if self.speculation is None else self.speculation.draft_names

    @property
    def companion(self) -> LoadedModel | None:
        """The loaded companion model, if any."""
        return self._parts.models.companion

    def save_corpus(self, path: str | PathLike[str]) -> None:
        """Save the texts that drafts continue, to name them as ``SpeculationConfig.corpus`` later.

        Args:
            path: the file; its name must end with ``.safetensors``.

        Raises:
            InvalidParameterError: there is no corpus, the target has no tokenizer, ``path`` is no
                path or does not end with ``.safetensors``, or the file cannot be written.
        """
        save_corpus(self.engine.corpus, path_name("path", path, "file"), self.target.tokenizer)

    @property
    def engine(self) -> Engine:
        """The engine, for callers that run the step loop themselves.

        It may be used alongside :meth:`generate` and :meth:`stream`; its class describes what such
        a loop must do.
        """
        return self._parts.engine

    @property
    def _parts(self) -> _Parts:
        if self._open_parts is None:
            raise ClosedError("LLM", "it is closed; create a new LLM")
        return self._open_parts

    def close(self) -> None:
        """Free the memory of models and caches, and end threads and processes.

        Running requests of other threads end with a :class:`~draftwise.errors.ClosedError`, and all
        later calls raise one. Another ``LLM`` made by :meth:`with_speculation`
        stays usable. ``del llm`` frees the memory as well. Closing twice has no effect.
        """
        parts, self._open_parts = self._open_parts, None
        if parts is not None:
            parts.engine.close()
            del parts
            return_free_memory()

    def __enter__(self) -> LLM:
        """Return the ``LLM``, which is closed at the end of the ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See :meth:`close`."""
        self.close()

    def __del__(
        self,
        # Defaults, because module globals may be gone at the exit of the interpreter.
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
        free_memory: Callable[[], None] = return_free_memory,
    ) -> None:
        # The engine may have another owner, so it is not closed.
        if getattr(self, "_open_parts", None) is not None and not is_finalizing():
            self._open_parts = None
            free_memory()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[list[Request]], None] | None = None,
        speculation: Speculations = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in batches and return the outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of prompts. A prompt is a string, a sequence of token ids
                (a list, tuple or range of integers, or a NumPy array or tensor of an integer
                type), or a list of chat messages (``{"role": …, "content": …}``), which the
                target's chat template formats. The content of a message is a string or a list of
                text parts (``{"type": "text", "text": …}``). A string that begins with the special
                tokens that the tokenizer adds does not get them again. A two-dimensional array is
                one prompt per row.
            sampling: sampling parameters, shared by all prompts or one per prompt.
            on_step: called after each step with the requests that received tokens, for example
                to show progress.
            speculation: settings that override :attr:`speculation`, shared by all prompts or one
                per prompt.

        Returns:
            One output per prompt. A prompt that fails has ``finish_reason`` ``error`` and its
            ``error`` set; the other prompts are not affected.

        Raises:
            ClosedError: the ``LLM`` is closed.
            DraftwiseError: the arguments are invalid, or every prompt failed; in the latter case
                the first error is raised. A prompt that did not end before the ``LLM`` was closed
                has failed.
        """
        each = as_list(prompts)
        call = Call(self.engine)
        try:
            requests = self._add_all(call, each, sampling, speculation)
            if on_step is None:
                call.finish()
            while not call.is_over:
                advanced = call.advance(lambda request: request)
                if on_step is not None:
                    on_step(advanced)
        finally:
            call.cancel()
        outputs = [
            RequestOutput.empty(prompt, FinishReason.ERROR, request)
            if isinstance(request, DraftwiseError)
            else request.output()
            for prompt, request in zip(each, requests, strict=True)
        ]
        errors = [output.error for output in outputs]
        if errors and errors[0] is not None and all(errors):
            raise errors[0]
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: Speculations = None,
    ) -> Iterator[StreamPiece]:
        """Generate for all prompts and yield text as it is generated, interleaved by prompt.

        The concatenated pieces of a prompt are the text that :meth:`generate` returns. Closing the
        iterator cancels the unfinished requests.
        """
        call = Call(self.engine)
        index_of: dict[Request, int] = {}

        def piece(request: Request) -> StreamPiece:
            new = request.take_new()
            return StreamPiece(
                index_of[request],
                new.text,
                new.token_ids,
                request.finish_reason,
                request.error,
                new.sources,
                new.logprobs,
            )

        try:
            requests = self._add_all(call, as_list(prompts), sampling, speculation)
            for index, request in enumerate(requests):
                if isinstance(request, DraftwiseError):
                    yield StreamPiece(index, "", [], FinishReason.ERROR, request)
                else:
                    index_of[request] = index
            while not call.is_over:
                yield from call.advance(piece)
        finally:
            call.cancel()

    def _add_all(
        self,
        call: Call,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        speculation: Speculations,
    ) -> list[Request | DraftwiseError]:
        """Add a request for each prompt to the engine and the call.

        Returns:
            One request per prompt, or the error of a prompt that cannot be added.
        """
        each = one_per_prompt("sampling", sampling, SamplingParams, prompts)
        overrides = one_per_prompt("speculation", speculation, RequestSpeculation, prompts)
        prepared = [self._prepare(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        requests: list[Request | DraftwiseError] = []
        with self.engine.turns:
            for inputs, params, override in zip(prepared, each, overrides, strict=True):
                if isinstance(inputs, DraftwiseError):
                    requests.append(inputs)
                    continue
                try:
                    request = self.engine.add(*inputs, params, override)
                except DraftwiseError as error:
                    requests.append(error)
                else:
                    call.add(request)
                    requests.append(request)
        return requests

    def _prepare(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[str | None, list[int]] | DraftwiseError:
        """Tokenize a prompt and compile its grammar, without blocking steps of other threads.

        Returns:
            Text and token ids of the prompt, or the error.
        """
        try:
            with self._parts.builder.tokenizing:
                inputs = tokenize(self.target.tokenizer, prompt)
            if params.structured_outputs is not None:
                self.engine.grammars.matcher(params.structured_outputs)  # fills the cache
        except DraftwiseError as error:
            return error
        return inputs

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt in the same way as :meth:`generate`.

        Raises:
            PromptError: the prompt is empty or malformed, or needs a tokenizer and the target has
                none.
        """
        with self._parts.builder.tokenizing:
            return tokenize(self.target.tokenizer, prompt)[1]
