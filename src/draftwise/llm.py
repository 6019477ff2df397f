"""The way in: load models once, generate for any number of prompts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from draftwise.building import BuildSettings, EngineBuilder
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.call import Call
from draftwise.engine.engine import Engine
from draftwise.engine.memory import cache_bytes
from draftwise.engine.request import Request
from draftwise.errors import ClosedError, DraftwiseError, InvalidParameterError
from draftwise.models.host_memory import return_free_memory
from draftwise.models.loading import LoadedModel, resolve_device, resolve_dtype
from draftwise.outputs import FinishReason, RequestOutput, StreamPiece
from draftwise.params import RequestSpeculation, SamplingParams, SpeculationConfig
from draftwise.prompts import Prompt, as_list, one_per_prompt, tokenize
from draftwise.values import boolean, integer, number, path_name, shown

Speculations = RequestSpeculation | Sequence[RequestSpeculation] | None


@dataclass(frozen=True)
class _Open:
    """What an ``LLM`` holds until it is closed."""

    builder: EngineBuilder
    engine: Engine
    models: Models


class LLM:
    """A target model, and perhaps a draft that makes it faster without changing what it says.

    Safe to call from several threads. Their requests run in one batch: a step that one thread takes
    advances the requests of all of them. An exception in one thread ends its own requests only,
    unless the step itself failed: then all requests of that time end with an
    :class:`~draftwise.errors.EngineError`.

    Attributes:
        target: the loaded target model.
        draft: the loaded draft model, if any.
        companion: the loaded companion model, if any.
        speculation: how it speculates, ``None`` for target-only decoding.
        max_chunk_tokens: prompt tokens processed per step.
        engine: the engine underneath, for callers that run the step loop themselves. It is safe to
            use beside :meth:`generate` and :meth:`stream`; see its class for what such a loop must
            do.
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
        trust_remote_code: bool = False,
        overlap: bool | None = None,
        draft_replicas: int = 1,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        """Load the models.

        Args:
            target: a folder (a string or a path), a hub id or a zoo name such as
                ``"zoo:target"``; with ``:int8`` behind it the weights of its linear layers are
                rounded to 8 bits, which makes it another model, of half the size.
            speculation: how to speculate; ``None`` for target-only decoding. A mapping may use
                vLLM's key names.
            dtype: ``"auto"``, ``"bfloat16"``, ``"float16"`` or ``"float32"``, or a
                :class:`torch.dtype`.
            device: ``"auto"``, ``"cpu"`` or ``"cuda"``, or a :class:`torch.device`.
            max_batch_size: requests that run at once; more wait.
            max_model_len: longest prompt and output together; ``None`` for the target's own.
            max_chunk_tokens: prompt tokens processed per step.
            cache_gib: memory for keys and values in GiB; ``None`` for half of what is free.
            trust_remote_code: run code that comes with a model. Off: no such code ever runs.
            overlap: draft for one half of the batch while the target verifies the other; ``None``
                where the latency profile says that it pays (it must have measured how the models
                slow each other down: ``draftwise profile-latency --interference``).
            draft_replicas: processes that draft, each for its share of the batch with a draft and a
                companion of its own: one for each device of the target. On CUDA replica i is on
                device i.
            on_status: called with what is done next, such as ``"loading zoo:target"``, where that
                takes seconds.

        Raises:
            DraftwiseError: a typed error that names the argument at fault.
        """
        target = path_name("target", target, "model")
        if isinstance(speculation, Mapping):
            speculation = SpeculationConfig.from_dict(speculation)
        if not isinstance(speculation, SpeculationConfig | None):
            raise InvalidParameterError(
                "speculation", f"must be a SpeculationConfig or a mapping, got {shown(speculation)}"
            )
        max_batch_size = integer("max_batch_size", max_batch_size, 1)
        max_chunk_tokens = integer("max_chunk_tokens", max_chunk_tokens, 1)
        draft_replicas = integer("draft_replicas", draft_replicas, 1)
        if max_model_len is not None:
            max_model_len = integer("max_model_len", max_model_len, 1)
        if cache_gib is not None:
            cache_gib = number("cache_gib", cache_gib, 0.0, math.inf, low_open=True)
        if overlap is not None and not isinstance(overlap, bool):
            raise InvalidParameterError(
                "overlap", f"must be true, false or None, got {shown(overlap)}"
            )
        boolean("trust_remote_code", trust_remote_code)
        if on_status is not None and not callable(on_status):
            raise InvalidParameterError("on_status", f"must be callable, got {shown(on_status)}")
        place = resolve_device(device)
        resolved = resolve_dtype(dtype, place)

        builder = EngineBuilder(
            target,
            max_model_len,
            BuildSettings(
                resolved,
                place,
                trust_remote_code,
                EngineOptions(max_batch_size, max_chunk_tokens, cache_bytes(cache_gib, place)),
                overlap,
                draft_replicas,
                on_status or _ignore,
            ),
        )
        self.max_chunk_tokens = max_chunk_tokens
        self.speculation: SpeculationConfig | None
        self._open: _Open | None = None
        self._set_builder(builder, Models(builder.target), speculation)

    def with_speculation(self, speculation: SpeculationConfig | None) -> LLM:
        """Another ``LLM`` on the same loaded target that speculates in another way.

        Weights are shared; caches and requests are not.
        """
        other = copy(self)
        other._set_builder(self._builder, self._models, speculation)
        return other

    def change_speculation(self, **changes: Any) -> None:
        """Speculate in another way from the next step on, also for requests that run.

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
        """The target with the draft and companion that a configuration names.

        Models that are at hand are shared.

        Raises:
            DraftwiseError: one cannot be loaded, or speaks of other tokens than the target.
        """
        return self._builder.load_models(speculation, self._models)

    @property
    def target(self) -> LoadedModel:
        """The loaded target model."""
        return self._models.target

    @property
    def draft(self) -> LoadedModel | None:
        """The loaded draft model, if any."""
        return self._models.draft

    @property
    def companion(self) -> LoadedModel | None:
        """The loaded companion model, if any."""
        return self._models.companion

    @property
    def engine(self) -> Engine:
        """The engine underneath."""
        return self._parts.engine

    @property
    def _models(self) -> Models:
        return self._parts.models

    @property
    def _builder(self) -> EngineBuilder:
        return self._parts.builder

    @property
    def _parts(self) -> _Open:
        if self._open is None:
            raise ClosedError("LLM", "it was closed; load the models anew")
        return self._open

    def _set_builder(
        self, builder: EngineBuilder, at_hand: Models, speculation: SpeculationConfig | None
    ) -> None:
        engine, models = builder.build(speculation, at_hand)
        self._open = _Open(builder, engine, models)
        self.speculation = speculation

    def close(self) -> None:
        """Give back the memory of models and caches, and end threads and processes.

        Requests of other threads end with a :class:`~draftwise.errors.ClosedError`, as does every
        use from then on. Another ``LLM`` made by :meth:`with_speculation` keeps what it shares with
        this one. ``del llm`` gives the memory back as well; closing twice does no harm.
        """
        parts, self._open = self._open, None
        if parts is not None:
            parts.engine.close()
            del parts
            return_free_memory()

    def __enter__(self) -> LLM:
        """Itself; it is closed at the end of the ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See :meth:`close`."""
        self.close()

    def __del__(
        self,
        # Names of modules may be gone when the interpreter ends.
        is_ending: Callable[[], bool] = sys.is_finalizing,
        give_back: Callable[[], None] = return_free_memory,
    ) -> None:
        # The engine may have another owner, so it is not closed.
        if getattr(self, "_open", None) is not None and not is_ending():
            self._open = None
            give_back()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[list[Request]], None] | None = None,
        speculation: Speculations = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched, and return the answers in their order.

        Args:
            prompts: one prompt or a list: strings, token ids (a list, tuple or range of integers,
                or a NumPy array or tensor of an integer type; one of two dimensions is several
                prompts), or lists of chat messages (``{"role": …, "content": …}``, through the
                target's chat template).
            sampling: one for all, or one per prompt.
            on_step: called after every step with the requests that gained tokens, for progress.
            speculation: how requests speculate where it differs from :attr:`speculation`; one for
                all, or one per prompt.

        Returns:
            One output per prompt. A prompt that cannot be served has ``finish_reason`` ``error``
            and its ``error`` set; the others are not affected.

        Raises:
            ClosedError: it was closed, before or meanwhile.
            DraftwiseError: the arguments as a whole are wrong, or every single prompt failed (the
                first error is raised).
        """
        each = as_list(prompts)
        call = Call(self.engine)
        try:
            requests = self._add_all(call, each, sampling, speculation)
            if on_step is None:
                call.finish()
            while not call.is_over:
                advanced = call.advance(_itself)
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
        """Generate for all prompts and yield text as it comes, the prompts' pieces interleaved.

        The pieces of a prompt joined are the text :meth:`generate` would return. Closing the
        iterator early cancels what is left.
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
        """Queue what can be served, as part of a call; an error for what cannot."""
        each = one_per_prompt("sampling", sampling, SamplingParams, prompts)
        ways = one_per_prompt("speculation", speculation, RequestSpeculation, prompts)
        read = [self._read(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
        requests: list[Request | DraftwiseError] = []
        with self.engine.turns:
            for known, params, way in zip(read, each, ways, strict=True):
                if isinstance(known, DraftwiseError):
                    requests.append(known)
                    continue
                try:
                    request = self.engine.add(*known, params, way)
                except DraftwiseError as error:
                    requests.append(error)
                else:
                    call.add(request)
                    requests.append(request)
        return requests

    def _read(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[str | None, list[int]] | DraftwiseError:
        """A prompt's text and tokens. What takes long is done here, while others take steps."""
        try:
            with self._builder.tokenizing:
                known = tokenize(self.target.tokenizer, prompt)
            if params.structured_outputs is not None:
                self.engine.grammars.matcher(params.structured_outputs)  # is kept
        except DraftwiseError as error:
            return error
        return known

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens that :meth:`generate` makes of one prompt.

        Raises:
            PromptError: it is empty or malformed, or the tokenizer for it is missing.
        """
        with self._builder.tokenizing:
            return tokenize(self.target.tokenizer, prompt)[1]


def _itself(request: Request) -> Request:
    return request


def _ignore(status: str) -> None:
    """For callers that do not ask what is being done."""
