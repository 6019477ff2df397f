"""The service behind the routes: engine client, admission control, tokenization and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from draftwise.chat_templates import ChatTemplateParams
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.prompts import Prompt, is_tokens, tokenize
from draftwise.serving.admission import Admission
from draftwise.serving.client import EngineClient
from draftwise.serving.deadline import Deadline
from draftwise.serving.errors import UnknownModelError
from draftwise.serving.generation import AnswerSpec, Generation
from draftwise.serving.health import Health, HealthStatus
from draftwise.serving.messages import EngineOutputs
from draftwise.serving.metrics import Metrics
from draftwise.serving.schemas import ChatBody, CompletionBody, Sampling
from draftwise.serving.settings import EngineSettings, ServerSettings
from draftwise.serving.statistics import Statistics
from draftwise.serving.tokenizing import TokenizerThread, TokenTexts
from draftwise.serving.tools.tagged import detect_parser
from draftwise.serving.tools.tooling import Tooling
from draftwise.serving.tracing import Tracing
from draftwise.structured_outputs import StructuredOutputs

# A prompt of maximum length leaves room for this many generated tokens.
_MIN_OUTPUT_TOKENS = 1
# A tokenizer that takes longer is considered stalled. At a million characters per second, texts
# of maximum length, and texts that are rejected as too long, take about ten microseconds per token
# of the context.
_TOKENIZING_SECONDS, _SECONDS_PER_TOKEN = 1.2, 2e-5
# Most log-probabilities of prompt tokens in a response. More would take gigabytes.
_MOST_PROMPT_LOGPROBS = 1 << 20


class Service:
    """An engine and the components of a server around it.

    Attributes:
        settings: settings of the HTTP server.
        client: client of the engine.
        metrics: Prometheus metrics.
        statistics: recent statistics of the engine.
        token_texts: texts of single tokens; set by :meth:`start`.
    """

    token_texts: TokenTexts

    def __init__(
        self,
        engine: EngineSettings,
        settings: ServerSettings | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Create the service; the models are not loaded yet."""
        self.settings = settings or ServerSettings()
        self._tracing = tracing or Tracing()
        self.metrics = Metrics()
        self.statistics = Statistics()
        self.client = EngineClient(engine, self._observe, self.metrics, self.settings.step_timeout)
        self._admission = Admission(
            engine.max_batch_size,
            self.settings.max_queue,
            partial(self.metrics.refused, "queue"),
        )
        self._tokenizing = TokenizerThread()

    async def start(self) -> None:
        """Load the models.

        Raises:
            DraftwiseError: they cannot be loaded.
        """
        await self.client.start()
        self.token_texts = TokenTexts(self.client.model.tokenizer)

    async def close(self) -> None:
        """Stop the engine and the threads of the service."""
        await self.client.close()
        self._tokenizing.close()
        await asyncio.to_thread(self._tracing.close)

    def health(self) -> Health:
        """Health of the engine and the tokenizer."""
        health = self.client.health
        seconds = self._tokenizing.busy_seconds
        if health.is_ok and not self._tokenizing.is_alive:
            return Health(HealthStatus.STALLED, "the tokenizer's thread has ended")
        longest = _TOKENIZING_SECONDS + _SECONDS_PER_TOKEN * self.max_prompt_tokens
        if health.is_ok and seconds > longest:
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
        """Name of the model in the API."""
        return self.settings.served_model_name or self.client.model.name

    @property
    def num_inside(self) -> int:
        """Number of admitted requests that have not ended."""
        return self._admission.num_inside

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens."""
        most = self.client.model.max_model_len - _MIN_OUTPUT_TOKENS
        return min(most, self.settings.max_prompt_tokens or most)

    def check_model(self, name: str | None) -> None:
        """Check the model name of a request.

        Raises:
            UnknownModelError: it is not the name of the served model.
        """
        if name not in (None, "", self.model_name):
            raise UnknownModelError(
                "model", f"{name!r} is not served; the served model is {self.model_name!r}"
            )

    async def completion(self, body: CompletionBody, client: str) -> Generation:
        """Prepare the answers to a body of `/v1/completions`.

        Args:
            body: body of the request.
            client: identifies the client, which shares no cached prefixes with others.

        Raises:
            DraftwiseError: the request is invalid; names the field.
        """
        if body.best_of not in (None, body.n):
            raise InvalidParameterError("best_of", "must be the same as n, or left out")
        self._check_choices(len(body.prompts()) * body.n)
        return await self._generation(body, client, list(body.prompts()), body.max_tokens)

    @property
    def tool_call_parser(self) -> str | None:
        """Name of the parser of tool calls; ``None`` if the format of the model is unknown."""
        return self.settings.tool_call_parser or detect_parser(self._chat_template)

    @property
    def _chat_template(self) -> Any:
        own = getattr(self.client.model.tokenizer, "chat_template", None)
        return self.settings.chat_template or own

    async def chat(self, body: ChatBody, tooling: Tooling, client: str) -> Generation:
        """Prepare the answers to a body of `/v1/chat/completions`.

        Args:
            body: body of the request.
            tooling: how its tools are presented, required and parsed.
            client: as in :meth:`completion`.

        Raises:
            DraftwiseError: the request is invalid; names the field.
        """
        self._check_choices(body.n)
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        messages = [message.plain() for message in body.messages]
        chat = ChatTemplateParams(tools=tooling.tools, variables=body.template_variables())
        return await self._generation(body, client, [messages], max_tokens, chat, tooling.grammar)

    def new_deadline(self) -> Deadline:
        """The deadline of a request that arrives now."""
        return Deadline(self.settings.request_timeout)

    async def tokenize(
        self, prompt: Prompt, deadline: Deadline, chat: ChatTemplateParams | None = None
    ) -> tuple[str | None, list[int]]:
        """Tokenize a prompt.

        Args:
            prompt: text, token ids, or messages.
            deadline: when the tokens are needed.
            chat: parameters of the chat template.

        Returns:
            The text, or ``None`` if token ids were given, and the token ids.

        Raises:
            PromptError: the prompt is empty, malformed or too long.
            DeadlineExceededError: it was not tokenized before the deadline.
        """
        tokenizer = self.client.model.tokenizer
        chat = replace(chat or ChatTemplateParams(), template=self.settings.chat_template)
        work = partial(tokenize, tokenizer, prompt, chat, max_tokens=self.max_prompt_tokens)
        if is_tokens(prompt):
            self._check_length(len(prompt))
            text, ids = work()
        else:
            text, ids = await self._tokenizing.run(work, deadline)
            self._check_length(len(ids))
        return text, ids

    async def detokenize(self, tokens: list[int], deadline: Deadline) -> str:
        """Convert token ids to text.

        Args:
            tokens: the token ids.
            deadline: when the text is needed.

        Raises:
            PromptError: the target has no tokenizer, or a token id is outside its vocabulary.
            DeadlineExceededError: they were not converted before the deadline.
        """
        model = self.client.model
        if model.tokenizer is None:
            raise PromptError("tokens", "the target has no tokenizer")
        for token in tokens:
            if token >= model.vocab_size:
                raise PromptError(
                    "tokens", f"token {token} is outside the vocabulary of {model.vocab_size}"
                )
        return await self._tokenizing.run(partial(model.tokenizer.decode, tokens), deadline)

    async def speculation(self, **changes: Any) -> dict[str, Any]:
        """Apply changes, if any, to the speculation settings and return the settings.

        Raises:
            InvalidParameterError: a change is invalid; nothing is changed.
            DeadlineExceededError: the engine did not respond before the request timeout.
            DraftwiseError: there is no engine.
        """
        deadline = self.new_deadline()
        try:
            async with asyncio.timeout(deadline.seconds_left):
                return await self.client.speculation(**changes)
        except TimeoutError:
            raise deadline.exceeded("the engine did not respond") from None

    def describe_model(self) -> dict[str, Any]:
        """Description of the model in `/v1/models`."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "draftwise",
            "root": self.client.model.name,
            "max_model_len": self.client.model.max_model_len,
            "eos_token_ids": list(self.client.model.eos_token_ids),
            "has_chat_template": bool(self._chat_template),
        }

    async def _generation(
        self,
        body: Sampling,
        client: str,
        prompts: list[Any],
        max_tokens: int | None,
        chat: ChatTemplateParams | None = None,
        grammar: StructuredOutputs | None = None,
    ) -> Generation:
        deadline = self.new_deadline()
        self.check_model(body.model)
        # A full queue refuses the prompts before they are tokenized.
        self._admission.check(len(prompts) * body.n)
        grammar_field = body.grammar_field() if grammar is None else "tools"
        if grammar is None:
            grammar = body.grammar()
        specs: list[AnswerSpec] = []
        for prompt in prompts:
            text, ids = await self.tokenize(prompt, deadline, chat)
            _check_prompt_logprobs(body, len(ids))
            most = max_tokens
            if most is None:
                # A prompt that fills the caches is refused by the engine.
                most = max(1, self.client.model.max_request_tokens - len(ids))
            for number in range(body.n):
                params = body.sampling(most, number, client)
                if grammar is not None:
                    params = replace(params, structured_outputs=grammar)
                specs.append(AnswerSpec(text, ids, params, number == 0))
        return Generation(
            self.client,
            self._admission,
            self.metrics,
            specs,
            body.own_speculation(),
            deadline,
            self._tracing,
            self.model_name,
            grammar_field,
            self.settings.per_request_spec_decode_metrics,
        )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_prompt_tokens:
            raise PromptError(
                "prompt",
                f"has {num_tokens} tokens; at most {self.max_prompt_tokens} tokens are allowed",
            )

    def _check_choices(self, count: int) -> None:
        if count > self.settings.max_choices:
            raise InvalidParameterError(
                "n", f"{count} answers are more than the {self.settings.max_choices} allowed"
            )

    def _observe(self, outputs: EngineOutputs) -> None:
        self.metrics.observe(outputs)
        self.statistics.observe(outputs)


def _check_prompt_logprobs(body: Sampling, num_tokens: int) -> None:
    """Check the number of log-probabilities of a prompt's tokens, over all of its answers.

    Raises:
        InvalidParameterError: there are too many.
    """
    most_likely = body.num_prompt_logprobs()
    if most_likely is None:
        return
    count = num_tokens * (most_likely + 1) * body.n
    if count > _MOST_PROMPT_LOGPROBS:
        raise InvalidParameterError(
            "logprobs",
            f"the {body.n} answers would have {count} log-probabilities of prompt tokens; at most "
            f"{_MOST_PROMPT_LOGPROBS} are allowed. Reduce n or logprobs, or set echo to false",
        )
