"""Requests to a server, and what is known of each of them when its answer has ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftwise.audit.answers import Json, Response, joined_chunks, read_response
from draftwise.audit.client import BUSY, Messages, Server, seconds_to_wait
from draftwise.benchmark.servers.exchange import Exchange, exchange

PATIENCE_SECONDS = 900.0
_SHOWN_BYTES = 400
# Reasoning and calls of tools are tokens too.
_CONTENTS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True)
class Answered:
    """A request and its answer.

    Attributes:
        start_seconds: when it was first sent, from the start of its turn.
        seconds: from its first sending to its end.
        text: the answer; empty after an error.
        num_tokens: generated tokens.
        ttft_seconds: from its first sending to the first text; ``None`` if the server did not
            stream, or sent no text.
        refused_seconds: part of these times until the server had room for the request.
        num_prompt_tokens: tokens of the prompt; ``None`` if the server does not say.
        counts_chunks: whether ``num_tokens`` is the number of chunks, as the server counts nothing.
        num_verified: drafted tokens that were verified; ``None`` if the server does not say.
        num_accepted: those that were accepted.
        acceptance_histogram: number of drafts of which 0, 1, 2, … tokens were accepted; empty if
            the server does not say.
        finish_reason: why the answer ended; ``None`` if the server does not say.
        error: why there is no answer; ``None`` if there is one.
    """

    start_seconds: float
    seconds: float
    text: str = ""
    num_tokens: int = 0
    ttft_seconds: float | None = None
    refused_seconds: float = 0.0
    num_prompt_tokens: int | None = None
    counts_chunks: bool = False
    num_verified: int | None = None
    num_accepted: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None

    @property
    def end_seconds(self) -> float:
        """When it ended, from the start of its turn."""
        return self.start_seconds + self.seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Seconds per token after the first text; ``None`` with fewer than two tokens."""
        if self.ttft_seconds is None or self.num_tokens < 2:
            return None
        return (self.seconds - self.ttft_seconds) / (self.num_tokens - 1)


async def ask(
    server: Server,
    prompt: str | Messages,
    fields: Mapping[str, Any],
    turn_start: float,
    patience: float = PATIENCE_SECONDS,
) -> Answered:
    """Send a request, again and again while the server has no room for it.

    Args:
        server: the server.
        prompt: a text, or the messages of a chat.
        fields: fields of the request, in the form of completions.
        turn_start: when the turn started, by ``time.perf_counter``.
        patience: maximum seconds of each try.
    """
    path, body = server.request(prompt, fields)
    start = time.perf_counter()
    refused = 0.0
    while True:
        try:
            done = await exchange(server.url, path, body, server.headers, patience)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            seconds = time.perf_counter() - start
            return Answered(start - turn_start, seconds, error=_reason(error, patience))
        if done.status not in BUSY or time.perf_counter() - start > patience:
            break
        await asyncio.sleep(seconds_to_wait(done.headers.get("retry-after")))
        refused = time.perf_counter() - start
    return _answered(done, start - turn_start, refused)


def _answered(done: Exchange, start: float, refused: float) -> Answered:
    """Read the response of the last try, which was sent ``refused`` seconds after the first."""
    seconds = refused + done.seconds
    if done.status != 200:
        text = done.body or b" ".join(data for _, data in done.events)
        shown = text[:_SHOWN_BYTES].decode("utf-8", "replace")
        return Answered(start, seconds, refused_seconds=refused, error=f"{done.status}: {shown}")
    try:
        response, ttft, num_chunks = _read(done)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Answered(start, seconds, refused_seconds=refused, error=f"malformed: {error!r}")
    answer, count = response.answers[0], response.num_tokens
    return Answered(
        start,
        seconds,
        answer.text,
        num_chunks if count is None else count,
        None if ttft is None else refused + ttft,
        refused,
        response.usage.get("prompt_tokens"),
        count is None,
        response.num_drafted,
        response.num_accepted,
        response.acceptance_histogram,
        answer.finish_reason,
    )


def _read(done: Exchange) -> tuple[Response, float | None, int]:
    """The answer, the seconds to its first text, and its number of chunks with text."""
    if not done.events:
        return read_response(json.loads(done.body)), None, 0
    times, chunks = [], []
    for seconds, data in done.events:
        if data != b"[DONE]":
            times.append(seconds)
            chunks.append(json.loads(data))
    with_text = [at for at, chunk in zip(times, chunks, strict=True) if _has_text(chunk)]
    response = joined_chunks(chunks)
    return _counted_by_timings(response, chunks), min(with_text, default=None), len(with_text)


def _has_text(chunk: Json) -> bool:
    parts = [choice.get("delta") or choice for choice in chunk.get("choices") or ()]
    return any(part.get("text") or any(map(part.get, _CONTENTS)) for part in parts)


def _counted_by_timings(response: Response, chunks: Sequence[Json]) -> Response:
    """A response with the counts of llama.cpp's timings, if it has none of usage."""
    timings = next((each["timings"] for each in reversed(chunks) if each.get("timings")), None)
    if response.num_tokens is not None or timings is None:
        return response
    return replace(response, usage={"completion_tokens": timings["predicted_n"]})


def _reason(error: Exception, patience: float) -> str:
    if isinstance(error, TimeoutError):
        return f"the answer did not end within {patience:.0f} seconds"
    if isinstance(error, EOFError):
        return "the connection was closed before the end of the answer"
    return f"no response: {error}"
