"""A client of OpenAI-compatible servers."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import httpx

from draftwise.audit.answers import Response, joined_chunks, read_response
from draftwise.audit.budget import Budget
from draftwise.errors import InvalidParameterError, ServerError

Fields = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Item = TypeVar("Item")
Result = TypeVar("Result")
KEY_VARIABLE = "DRAFTWISE_API_KEY"
_CONNECT_SECONDS, _ANSWER_SECONDS, _BUSY_SECONDS = 10.0, 600.0, 120.0
BUSY = (429, 503)
_LONGEST_WAIT_SECONDS = 10.0
_MOST_LOST = 3


class Model(Protocol):
    """What answers prompts: a server, or a model in this process.

    Attributes:
        name: how reports call it.
        num_drafted: drafted tokens that were verified in its answers; ``None`` if it never said.
        num_accepted: those that were accepted.
    """

    name: str
    num_drafted: int | None
    num_accepted: int

    def ask(self, prompt: str | Messages, **fields: Any) -> Response:
        """Answer a prompt.

        Args:
            prompt: a text, or the messages of a chat.
            **fields: fields of a request in the form of completions; ``logprobs`` is the number of
                most likely tokens.

        Raises:
            ServerError: the request is refused, or there is no response.
            SpentError: the limit of the audit is reached.
        """

    def token_ids(self, text: str) -> list[int] | None:
        """Tokens of a text; ``None`` if they cannot be found out."""

    def command(self, prompt: str | Messages, **fields: Any) -> str:
        """A command of a shell that repeats :meth:`ask`."""

    def close(self) -> None:
        """Free what it holds."""


class Server:
    """A server. Its methods may be called by several threads.

    Attributes:
        name: its address, with the fields that every request has.
        url: its address.
        model: name of its model.
        owner: ``owned_by`` of the model, which names the engine.
        num_drafted, num_accepted: see :class:`Model`.
        headers: headers of every request, with the key.
    """

    def __init__(
        self,
        url: str,
        budget: Budget,
        *,
        model: str | None = None,
        api_key: str | None = None,
        chat: bool = False,
        fields: Fields | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to a server and ask for its models.

        Args:
            url: address without ``/v1``.
            budget: counts the answers.
            model: name of the model; ``None`` for the first one that is listed.
            api_key: sent with every request.
            chat: ask texts as messages of a user.
            fields: fields of every request.
            transport: in place of the network.

        Raises:
            InvalidParameterError: the key is invalid.
            ServerError: the server does not respond as expected.
        """
        self.url, self._budget, self._chat = url, budget, chat
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._fields, self._has_key = dict(fields or {}), api_key is not None
        self.name = url + (f" with {json.dumps(self._fields)}" if self._fields else "")
        self.num_drafted: int | None = None
        self.num_accepted = 0
        try:
            self._client = httpx.Client(
                base_url=url,
                headers=self.headers,
                timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
                # A proxy of the environment must not answer for a server of this machine.
                trust_env=False,
                transport=transport,
            )
        except UnicodeEncodeError as error:
            raise InvalidParameterError("api_key", "has characters that are not ASCII") from error
        try:
            listed = self._listed_models()
        except ServerError:
            self.close()
            raise
        self.model = model or listed[0]["id"]
        self.owner = next(
            (str(each.get("owned_by", "")) for each in listed if each["id"] == self.model), ""
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def ask(self, prompt: str | Messages, **fields: Any) -> Response:
        """See :meth:`Model.ask`."""
        self._budget.spend(fields.get("n", 1))
        path, body = self.request(prompt, fields)
        response = self._post(path, body)
        try:
            answers = read_response(response.json())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(self.name, f"its answer has another format: {error!r}") from error
        if answers.num_drafted is not None:
            self.num_drafted = (self.num_drafted or 0) + answers.num_drafted
            self.num_accepted += answers.num_accepted
        return answers

    def stream(self, prompt: str | Messages, **fields: Any) -> Response:
        """Answer a prompt by a stream, and join its chunks.

        Raises:
            ServerError: the request is refused, or the stream is malformed.
            SpentError: the limit of the audit is reached.
        """
        self._budget.spend(1)
        path, body = self.request(prompt, {**fields, "stream": True})
        response = self._post(path, body)
        lines = [line for line in response.text.splitlines() if line.startswith("data:")]
        contents = [line.removeprefix("data:").strip() for line in lines]
        try:
            return joined_chunks([json.loads(each) for each in contents if each != "[DONE]"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(self.name, f"its stream has another format: {error!r}") from error

    def token_ids(self, text: str) -> list[int] | None:
        """See :meth:`Model.token_ids`; by ``/tokenize``, in the forms of vLLM and llama.cpp."""
        for body in ({"model": self.model, "prompt": text}, {"content": text}):
            try:
                response = self._client.post("/tokenize", json=body)
                tokens = response.json()["tokens"] if response.is_success else None
            except (httpx.HTTPError, KeyError, ValueError, TypeError):
                tokens = None
            # llama.cpp's server finds no text in vLLM's form, and answers with no tokens.
            if isinstance(tokens, list) and tokens and all(type(each) is int for each in tokens):
                return tokens
        return None

    def get(self, path: str) -> str | None:
        """Text of a page; ``None`` if there is no such page."""
        try:
            response = self._client.get(path)
        except httpx.HTTPError:
            return None
        return response.text if response.is_success else None

    def command(self, prompt: str | Messages, **fields: Any) -> str:
        """See :meth:`Model.command`."""
        return self._command(*self.request(prompt, fields))

    def _command(self, path: str, body: Fields) -> str:
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if self._has_key else ""
        return (
            f"curl -s {shlex.quote(self.url + path)} -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )

    def request(self, prompt: str | Messages, fields: Fields) -> tuple[str, dict[str, Any]]:
        """Path and body of a request.

        Args:
            prompt: a text, or the messages of a chat.
            fields: as in :meth:`Model.ask`.
        """
        body = {"model": self.model}
        if isinstance(prompt, str) and not self._chat:
            return "/v1/completions", {**body, "prompt": prompt, **fields, **self._fields}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        own = dict(fields)
        if own.get("logprobs") is not None:
            own |= {"logprobs": True, "top_logprobs": own["logprobs"]}
        return "/v1/chat/completions", {**body, "messages": list(messages), **own, **self._fields}

    def _post(self, path: str, body: Fields) -> httpx.Response:
        """Send a request, again and again while the server is busy."""
        patience, num_lost = time.monotonic() + _BUSY_SECONDS, 0
        while True:
            try:
                response = self._client.post(path, json=body)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                # Servers close connections that were idle, perhaps just as a request is sent.
                num_lost += 1
                if num_lost > _MOST_LOST:
                    raise self._error(f"does not respond: {error!r}", path, body) from error
                continue
            except httpx.HTTPError as error:
                raise self._error(f"does not respond: {error!r}", path, body) from error
            if response.status_code not in BUSY or time.monotonic() > patience:
                break
            time.sleep(seconds_to_wait(response.headers.get("retry-after")))
        if not response.is_success:
            message = f"{response.status_code}: {_message(response)}"
            raise self._error(message, path, body, response.status_code)
        return response

    def _error(
        self, message: str, path: str, body: Fields, status: int | None = None
    ) -> ServerError:
        error = ServerError(self.name, message)
        error.status, error.command = status, self._command(path, body)
        return error

    def _listed_models(self) -> list[dict[str, Any]]:
        try:
            response = self._client.get("/v1/models")
            listed = response.raise_for_status().json()["data"]
            if listed and all("id" in each for each in listed):
                return list(listed)
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError, TypeError) as error:
            raise ServerError(self.url, f"does not list its models: {error}") from error
        raise ServerError(self.url, "lists no model; name one that it serves with --model")


def at_once(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> list[Result]:
    """Results of a function for all items, several at a time.

    Raises:
        ServerError, SpentError: those of the function.
    """
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return list(pool.map(work, items))


def seconds_to_wait(text: str | None) -> float:
    """Seconds until a refused request is sent again, by its `Retry-After`."""
    try:
        return min(max(0.05, float(text or 1.0)), _LONGEST_WAIT_SECONDS)
    except ValueError:
        return 1.0


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or "refused without a message"
