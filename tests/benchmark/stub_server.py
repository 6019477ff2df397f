"""A server that answers in prescribed bytes, in a thread with its own event loop.

It writes HTTP by hand, so that answers can come in all forms and pieces in which servers send them.
"""

import asyncio
import json
import threading
from contextlib import suppress

WORDS = ("one", " two", " three", " four")
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def chunk(text, **others):
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], **others}


def stream(*chunks, end="\n\n", done=True):
    """The events of a stream, as bytes."""
    lines = [f"data: {json.dumps(each, ensure_ascii=False)}{end}" for each in chunks]
    return "".join([*lines, f"data: [DONE]{end}" if done else ""]).encode()


PLAIN = stream(*map(chunk, WORDS), {"choices": [], "usage": USAGE})


def chunked(body, size):
    """A body in chunks of HTTP."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class StubServer:
    """The server.

    Attributes:
        answer: called with each body; returns the bytes of a response.
        refuses: fields that it refuses with status 400.
        metrics: text of /metrics.
        settings: what /v1/speculation returns; ``None`` for no such path.
        bodies: bodies of the requests for answers so far.
        most_at_once: most requests that it answered at once.
        url: its address.
    """

    def __init__(self, answer=None, refuses=(), metrics="", settings=None, owner="tests"):
        self.answer = answer or (lambda body: http(PLAIN))
        self.refuses, self.metrics, self.settings, self.owner = refuses, metrics, settings, owner
        self.bodies, self.most_at_once, self._at_once = [], 0, 0
        self._connections = {}
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stub")

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()

    def _run(self):
        self._loop.run_until_complete(self._serve())

    async def _serve(self):
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        async with server:
            await self._stop.wait()
            # Connections that clients left are closed before the server is, which would leave
            # those open that it has just accepted.
            await asyncio.sleep(0)
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for writer in self._connections.values():
                    writer.transport.abort()
                await asyncio.wait(others, timeout=0.01)

    async def _connected(self, reader, writer):
        self._connections[asyncio.current_task()] = writer
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            del self._connections[asyncio.current_task()]

    async def _answer(self, reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n")[0].split(" ")
            length = head.lower().partition("content-length:")[2].partition("\r\n")[0]
            body = await reader.readexactly(int(length)) if method == "POST" else b""
            for piece in await self._pieces(path, body):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    async def _pieces(self, path, body):
        if path == "/v1/models":
            return [plain_json({"data": [{"id": "stub", "owned_by": self.owner}]})]
        if path == "/metrics":
            return [plain_json(self.metrics)]
        if path == "/v1/speculation" and self.settings is not None:
            return [plain_json(self.settings)]
        if not path.endswith("/completions"):
            return [plain_json({"error": {"message": "no such path"}}, 404)]
        fields = json.loads(body)
        if set(fields) & set(self.refuses):
            return [plain_json({"error": {"message": "unknown field"}}, 400)]
        if not fields.get("stream"):
            whole = {"choices": [{"index": 0, "text": "a"}], "usage": USAGE}
            return [plain_json(whole)]
        self.bodies.append(fields)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0.01)
        self._at_once -= 1
        answer = self.answer(fields)
        return answer if isinstance(answer, list) else [answer]


def plain_json(content, status=200, **headers):
    """A response with its length; a text is sent as it is."""
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    named = {"content-type": "application/json", "connection": "close", **headers}
    named["content-length"] = len(body)
    return _head(status, named) + body


def http(body, size=1 << 20, kind="text/event-stream; charset=utf-8"):
    """A chunked response, in chunks of a size."""
    return _head(200, {"Content-Type": kind, "Transfer-Encoding": "chunked"}) + chunked(body, size)


def until_closed(body):
    """A response without a length, which the closed connection ends."""
    return _head(200, {"content-type": "text/event-stream"}) + body


def _head(status, headers):
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {each}" for name, each in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"
