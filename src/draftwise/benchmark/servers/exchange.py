"""One request over a connection of its own, with the time at which each part of the answer came.

Client and server often share the cores of a machine, so the client does as little as possible while
answers arrive: it notes times and keeps the bytes, which are read when the answer has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16
# A line of an event may have the log-probabilities of a whole answer.
_LONGEST_LINE = 1 << 24
_EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Exchange:
    """A request and its response.

    Attributes:
        status: HTTP status.
        seconds: from sending to the end of the response.
        events: data of each server-sent event, with the seconds after which it came; empty if the
            response is no stream.
        body: the response, if it is no stream.
        headers: headers of the response, by their names in lower case.
    """

    status: int
    seconds: float
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


async def exchange(
    url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str], patience: float
) -> Exchange:
    """Send a body as JSON, and wait for the whole response.

    Args:
        url: address of the server.
        path: path at the server.
        body: body of the request.
        headers: further headers.
        patience: maximum seconds until the end of the response.

    Raises:
        OSError, EOFError, ValueError: there is no response, or it is malformed; a
            :class:`TimeoutError` after ``patience``.
    """
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    content = json.dumps(body).encode()
    lines = [
        f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Connection: close",
        "Accept: text/event-stream, application/json",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    head = "\r\n".join(lines).encode("ascii") + b"\r\n\r\n"
    start = time.perf_counter()
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(
            parts.hostname,
            parts.port or (443 if is_secure else 80),
            ssl=is_secure or None,
            limit=_LONGEST_LINE,
        )
        try:
            writer.write(head + content)
            return await _response(reader, start)
        finally:
            writer.close()


async def _response(reader: asyncio.StreamReader, start: float) -> Exchange:
    status, headers = await _head(reader)
    is_stream = headers.get("content-type", "").startswith(_EVENTS)
    events: list[tuple[float, bytes]] = []
    rest = b""
    async for piece in _pieces(reader, headers):
        rest += piece
        if is_stream:
            now = time.perf_counter() - start
            *lines, rest = rest.split(b"\n")
            events += [(now, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    seconds = time.perf_counter() - start
    if not is_stream:
        return Exchange(status, seconds, body=rest, headers=headers)
    if rest.startswith(b"data:"):  # the last line has no end
        events.append((seconds, rest[5:].strip()))
    return Exchange(status, seconds, events, headers=headers)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of a response."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    protocol, status, *_ = lines[0].split(" ")
    if not protocol.startswith("HTTP/"):
        raise ValueError(f"the response begins with {lines[0][:40]!r}")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(status), {name.lower(): value.strip() for name, _, value in pairs}


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body of a response, in the pieces in which it comes."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    missing = int(headers["content-length"]) if "content-length" in headers else None
    while missing is None or missing > 0:
        piece = await reader.read(_PIECE_BYTES)
        if piece:
            yield piece
        elif missing is None:
            return
        else:
            raise asyncio.IncompleteReadError(b"", missing)
        missing = None if missing is None else missing - len(piece)
