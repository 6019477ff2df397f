"""Everything behind the routes: the engine, who may ask it, and what is counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from draftwise.errors import InvalidParameterError, PromptError
from draftwise.prompts import ChatFormat, Prompt, is_tokens, tokenize
from draftwise.serving.admission import Admission
from draftwise.serving.client import EngineClient
from draftwise.serving.errors import DeadlineExceededError, UnknownModelError
from draftwise.serving.generation import Generation, Question
from draftwise.serving.health import Health, HealthStatus
from draftwise.serving.messages import Turn
from draftwise.serving.metrics import Metrics
from draftwise.serving.schemas import ChatBody, CompletionBody, Sampling
from draftwise.serving.settings import EngineSettings, ServerSettings
from draftwise.serving.statistics import Statistics
from draftwise.serving.token_texts import TokenTexts
from draftwise.serving.tokenizing import TokenizerThread
from draftwise.serving.tools.preparation import Tooling
from draftwise.serving.tools.registry import recognise
from draftwise.serving.tracing import NoTracing, Tracing
from draftwise.structured_outputs import StructuredOutputs

# A context that is full to the last token leaves room for this one.
_AT_LEAST_ONE = 1
# A tokenizer that takes longer hangs. At a million characters per second, a text that fills the
# context, or is refused for not fitting, takes some ten microseconds per token of the context.
_TOKENIZING_SECONDS, _PER_TOKEN = 1.2, 2e-5


class Service:
    """One engine and what a server needs around it.

    Attributes:
        settings: how clients are treated.
        client: of the engine.
        metrics: what is counted.
        statistics: what happened lately.
        token_texts: of the model's tokens; known once :meth:`start` is done.
    """

    token_texts: TokenTexts

    def __init__(
        self,
        engine: EngineSettings,
        settings: ServerSettings | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Set up; nothing is loaded yet."""
        self.settings = settings or ServerSettings()
        self._tracing = tracing or NoTracing()
        self.metrics = Metrics()
        self.statistics = Statistics()
        self.client = EngineClient(engine, self._observe, self.metrics, self.settings.step_timeout)
        self._admission = Admission(engine.max_batch_size, self.settings.max_queue)
        self._tokenizing = TokenizerThread(self.settings.request_timeout)

    async def start(self) -> None:
        """Load the models.

        Raises:
            DraftwiseError: they cannot be loaded.
        """
        await self.client.start()
        self.token_texts = TokenTexts(self.client.model.tokenizer)

    async def close(self) -> None:
        """End the engine."""
        await self.client.close()
        self._tokenizing.close()
        await asyncio.to_thread(self._tracing.close)

    def health(self) -> Health:
        """Whether requests are answered now."""
        health = self.client.health
        seconds = self._tokenizing.busy_seconds
        if health.is_ok and not self._tokenizing.is_alive:
            return Health(HealthStatus.STALLED, "the tokenizer's thread has ended")
        if health.is_ok and seconds > _TOKENIZING_SECONDS + _PER_TOKEN * self.max_prompt_tokens:
            return Health(
                HealthStatus.STALLED, f"the tokenizer has not responded for {seconds:.1f} seconds"
            )
        return health

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        self.metrics.engine_is_up(self.client.health.is_ok)
        return self.metrics.text()

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_model_name or self.client.model.name

    @property
    def num_inside(self) -> int:
        """Requests that were let in and have not ended."""
        return self._admission.num_inside

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        most = self.client.model.max_model_len - _AT_LEAST_ONE
        return min(most, self.settings.max_prompt_tokens or most)

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the one that is served.

        Raises:
            UnknownModelError: it is another one.
        """
        if name not in (None, "", self.model_name):
            raise UnknownModelError(
                "model", f"{name!r} is not served here; the model is {self.model_name!r}"
            )

    async def completion(self, body: CompletionBody) -> Generation:
        """What `/v1/completions` asks for.

        Raises:
            DraftwiseError: it cannot be answered; names the field.
        """
        if body.best_of not in (None, body.n):
            raise InvalidParameterError("best_of", "must be the same as n, or left out")
        self._check_choices(len(body.prompts()) * body.n)
        return await self._generation(body, list(body.prompts()), body.max_tokens)

    @property
    def tool_call_parser(self) -> str | None:
        """Of calls that the model makes of its own accord; ``None`` if they are not known."""
        own = getattr(self.client.model.tokenizer, "chat_template", None)
        template = self.settings.chat_template or own
        return self.settings.tool_call_parser or recognise(template)

    async def chat(self, body: ChatBody, tooling: Tooling) -> Generation:
        """What `/v1/chat/completions` asks for.

        Args:
            body: of the request.
            tooling: what its tools mean.

        Raises:
            DraftwiseError: it cannot be answered; names the field.
        """
        self._check_choices(body.n)
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        messages = [message.plain() for message in body.messages]
        chat = ChatFormat(tools=tooling.tools, variables=body.chat_template_kwargs)
        return await self._generation(body, [messages], max_tokens, chat, tooling.form)

    async def tokenize(
        self, prompt: Prompt, chat: ChatFormat | None = None
    ) -> tuple[str | None, list[int]]:
        """Text and tokens of a prompt.

        Args:
            prompt: text, token ids, or messages.
            chat: how messages become a prompt.

        Raises:
            PromptError: it is empty, malformed or too long.
        """
        tokenizer = self.client.model.tokenizer
        chat = replace(chat or ChatFormat(), template=self.settings.chat_template)
        work = partial(tokenize, tokenizer, prompt, chat, max_tokens=self.max_prompt_tokens)
        if is_tokens(prompt):
            self._check_length(len(prompt))
            text, ids = work()
        else:
            text, ids = await self._tokenizing.run(work)
            self._check_length(len(ids))
        return text, ids

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of tokens.

        Raises:
            PromptError: the target has no tokenizer, or not such a token.
        """
        model = self.client.model
        if model.tokenizer is None:
            raise PromptError("tokens", "the target has no tokenizer")
        for token in tokens:
            if token >= model.vocab_size:
                raise PromptError(
                    "tokens", f"token {token} is outside the vocabulary of {model.vocab_size}"
                )
        return await self._tokenizing.run(partial(model.tokenizer.decode, tokens))

    async def speculation(self, **changes: Any) -> dict[str, Any]:
        """How the engine speculates, after some changes perhaps.

        Raises:
            InvalidParameterError: a change cannot be made; nothing is changed.
            DeadlineExceededError: the engine does not answer in time.
            DraftwiseError: there is no engine.
        """
        try:
            async with asyncio.timeout(self.settings.request_timeout):
                return await self.client.speculation(**changes)
        except TimeoutError:
            seconds = self.settings.request_timeout
            raise DeadlineExceededError(
                "request_timeout", f"the engine did not answer in {seconds:g} seconds"
            ) from None

    def describe_model(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "draftwise",
            "root": self.client.model.name,
            "max_model_len": self.client.model.max_model_len,
        }

    async def _generation(
        self,
        body: Sampling,
        prompts: list[Any],
        max_tokens: int | None,
        chat: ChatFormat | None = None,
        form: StructuredOutputs | None = None,
    ) -> Generation:
        self.check_model(body.model)
        questions: list[Question] = []
        for prompt in prompts:
            text, ids = await self.tokenize(prompt, chat)
            most = max_tokens
            if most is None:
                most = self.client.model.max_model_len - len(ids)
            for number in range(body.n):
                params = body.sampling(most, number)
                if form is not None:
                    params = replace(params, structured_outputs=form)
                questions.append(Question(text, ids, params, number == 0))
        return Generation(
            self.client,
            self._admission,
            self.metrics.requests,
            questions,
            body.own_speculation(),
            self.settings.request_timeout,
            self._tracing,
            self.model_name,
            body.form_field() if form is None else "tools",
        )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_prompt_tokens:
            raise PromptError(
                "prompt", f"has {num_tokens} tokens; the longest has {self.max_prompt_tokens}"
            )

    def _check_choices(self, count: int) -> None:
        if count > self.settings.max_choices:
            raise InvalidParameterError(
                "n", f"{count} answers are more than the {self.settings.max_choices} allowed"
            )

    def _observe(self, turn: Turn) -> None:
        self.metrics.observe(turn)
        self.statistics.observe(turn)
