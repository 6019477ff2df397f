"""Chat models for ``draftwise chat``: loaded in this process or behind a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from draftwise.engine.call import Call
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.llm import LLM
from draftwise.outputs import TokenSource
from draftwise.params import SamplingParams
from draftwise.prompts import tokenize
from draftwise.serving.errors import EngineUnavailableError

Message = Mapping[str, str]
_CONNECT_SECONDS = 10.0


@dataclass
class Reply:
    """Text and counts of an answer.

    Attributes:
        text: text of the answer.
        num_tokens: number of generated tokens.
        mean_accepted_length: generated tokens per step.
        lossless: whether the answer has exactly the target's distribution.
    """

    text: str = ""
    num_tokens: int = 0
    mean_accepted_length: float = 0.0
    lossless: bool = True


class ChatModel(Protocol):
    """Interface of a model that answers chat messages."""

    name: str

    def answer(
        self, messages: Sequence[Message], reply: Reply
    ) -> Iterator[tuple[str, TokenSource]]:
        """Generate the next message; yields text with the source of its token.

        Args:
            messages: earlier messages, ending with one of the user.
            reply: updated during generation.
        """


class LocalChatModel:
    """A model in this process.

    Attributes:
        name: name of the model.
    """

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        """Wrap a loaded model."""
        self._llm, self._params = llm, params
        self.name = llm.target.name

    def answer(
        self, messages: Sequence[Message], reply: Reply
    ) -> Iterator[tuple[str, TokenSource]]:
        """See :class:`ChatModel`."""
        llm = self._llm
        text, ids = tokenize(llm.target.tokenizer, messages)
        call = Call(llm.engine)
        request = llm.engine.add(text, ids, self._params)
        call.add(request)
        try:
            while not call.is_over:
                for new in call.advance(Request.take_new):
                    for piece in new.texts:
                        reply.text += piece[0]
                        yield piece
        finally:
            call.cancel()
            reply.num_tokens = request.stats.num_tokens
            reply.mean_accepted_length = request.stats.mean_accepted_length
            reply.lossless = request.stats.lossless
        if request.error is not None:
            raise request.error


class ServerChatModel:
    """A model of an OpenAI-compatible server; only Draftwise reports the sources of tokens.

    Attributes:
        name: name of the model and address of the server.
    """

    def __init__(self, url: str, api_key: str | None, options: Mapping[str, Any]) -> None:
        """Connect to a server and ask for the name of its model.

        Args:
            url: address of the server, with or without ``/v1`` at its end.
            api_key: API key, if the server requires one.
            options: additional keys of every request.

        Raises:
            InvalidParameterError: the URL or the API key is invalid.
            EngineUnavailableError: the server does not respond, or its response is invalid.
        """
        base = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        try:
            self._client = httpx.Client(base_url=f"{base}/v1", headers=headers, timeout=timeout)
        except UnicodeEncodeError as error:
            raise InvalidParameterError("api_key", "has characters that are not ASCII") from error
        except httpx.InvalidURL as error:
            raise InvalidParameterError("server", f"{url!r} is not a valid URL: {error}") from error
        try:
            self._model = self._only_model()
        except (httpx.HTTPError, KeyError, ValueError, IndexError, TypeError) as error:
            self.close()
            raise EngineUnavailableError(
                "server", f"{url!r} does not respond as expected: {error}"
            ) from error
        except EngineUnavailableError:
            self.close()
            raise
        self._options = options
        self.name = f"{self._model} at {base}"

    def answer(
        self, messages: Sequence[Message], reply: Reply
    ) -> Iterator[tuple[str, TokenSource]]:
        """See :class:`ChatModel`."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_tokens": True,
            **self._options,
        }
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise EngineUnavailableError("server", _message(response.read().decode()))
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        yield from _pieces(json.loads(line.removeprefix("data: ")), reply)
        except httpx.HTTPError as error:
            raise EngineUnavailableError(
                "server", f"the connection was lost during the answer: {error}"
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _only_model(self) -> str:
        answer = self._client.get("/models")
        if answer.status_code != httpx.codes.OK:
            raise EngineUnavailableError("server", _message(answer.text))
        name: str = answer.json()["data"][0]["id"]
        return name


def _pieces(chunk: Mapping[str, Any], reply: Reply) -> Iterator[tuple[str, TokenSource]]:
    if "error" in chunk:
        raise DraftwiseError("server", chunk["error"].get("message", "failed"))
    if chunk.get("usage"):
        reply.num_tokens = chunk["usage"]["completion_tokens"]
        speculation = chunk["usage"].get("speculation") or {}
        reply.mean_accepted_length = speculation.get("mean_accepted_length", 0.0)
        reply.lossless = speculation.get("lossless", True)
    for choice in chunk["choices"]:
        content = choice["delta"].get("content") or ""
        reply.text += content
        tokens = choice.get("tokens") or [{"text": content, "source": TokenSource.TARGET}]
        for token in tokens:
            if token["text"]:
                yield token["text"], TokenSource(token["source"])


def _message(text: str) -> str:
    try:
        message: str = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200] or "rejected the request without a message"
    return message
