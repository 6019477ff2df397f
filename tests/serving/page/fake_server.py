"""A fake server with the API of the page, controlled by tests."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

import draftwise

PAGE = Path(draftwise.__file__).parent / "serving" / "page"

PIECES = [
    ("target", "def"),
    ("draft", " gcd"),
    ("draft", "(a, b):"),
    ("correction", "\n"),
    ("draft", "    "),
    ("draft", "return"),
    ("draft", " a if b == 0"),
    ("bonus", " else gcd"),
    ("copy", "(b, a % b)"),
    ("correction", "\n"),
]

POLICIES = [
    ("none", True, "target-only decoding", True),
    ("fixed", True, "always num_speculative_tokens, all verified", True),
    ("adaptive", True, "drafts and verifies what pays", True),
    ("sv", True, "also asks a companion what it thinks", True),
    ("tetris_published", False, "the batch's likeliest tokens", True),
    ("disco", True, "stops after a token a classifier rejects", False),
]


def error(message, param=None, kind="invalid_request_error"):
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


class WrongKeyError(Exception):
    pass


class FakeServer:
    """Responses and received requests of the fake server.

    Attributes:
        pieces: (source, text) of each token of the next answers.
        held: an answer stops before its last token while this is not set.
        broken: after all tokens an answer ends in this error.
        refusal: (status, body, headers) sent instead of an answer.
        change_refusal: the body sent instead of a change.
        key: the API key it wants.
        has_chat_template: whether the models have one.
        usage: what speculation came to, in the last chunk.
        stats: the figures sent next.
        asked: (path, body, headers) of every POST and PATCH.
        num_polls: how often figures were asked for.
        left: set when a client went away in the middle of an answer.
    """

    def __init__(self):
        self.url = None
        self.pieces = list(PIECES)
        self.held = threading.Event()
        self.held.set()
        self.broken = None
        self.refusal = None
        self.change_refusal = None
        self.key = None
        self.usage = {
            "lossless": True,
            "num_steps": 4,
            "num_drafted": 12,
            "num_scored": 0,
            "num_verified": 10,
            "num_accepted": 6,
            "mean_accepted_length": 2.5,
            "acceptance_rate": 0.6,
            "seconds_saved": 0.5,
        }
        self.speculation = {
            "enabled": True,
            "policy": "sv",
            "policy_options": {},
            "num_speculative_tokens": 5,
            "max_num_speculative_tokens": 8,
            "lenience": 1.0,
            "target": "zoo:target@200m",
            "draft": "zoo:draft",
            "companion": "zoo:companion",
            "policies": [
                dict(zip(("name", "lossless", "description", "usable"), each, strict=True))
                for each in POLICIES
            ],
        }
        self.stats = {
            "status": "ok",
            "reason": None,
            "time": 0.0,
            "num_running": 2,
            "num_waiting": 1,
            "goodput": 123.0,
            "step_seconds": 0.0215,
            "mean_accepted_length": 2.75,
            "acceptance_rate": 0.6,
            "prefix_cache_hit_rate": 0.42,
            "guard_balance": 12.34,
            "acceptance_by_position": [0.9, 0.7, 0.5],
            "time_split": {
                "draft": 0.2,
                "companion": 0.1,
                "select": 0.02,
                "verify": 0.6,
                "accept": 0.05,
                "rest": 0.03,
            },
            "uptime_seconds": 4000.0,
        }
        self.models = ["zoo:target@200m"]
        self.has_chat_template = True
        self.asked = []
        self.num_polls = 0
        self.left = threading.Event()

    @property
    def bodies(self):
        return [body for _, body, _ in self.asked]

    def app(self):
        app = FastAPI()

        def guard(request: Request):
            given = request.headers.get("Authorization")
            if self.key and given != f"Bearer {self.key}":
                raise WrongKeyError

        guarded = {"dependencies": [Depends(guard)]}

        @app.exception_handler(WrongKeyError)
        def refuse(request: Request, _: WrongKeyError):
            return JSONResponse(error("Give the API key.", kind="authentication_error"), 401)

        @app.get("/")
        def index():
            policy = {"Content-Security-Policy": "default-src 'self'"}
            return FileResponse(PAGE / "index.html", headers=policy)

        app.mount("/page", StaticFiles(directory=PAGE))

        @app.get("/v1/models", **guarded)
        def models():
            about = {"has_chat_template": self.has_chat_template}
            return {"object": "list", "data": [{"id": name, **about} for name in self.models]}

        @app.get("/v1/stats", **guarded)
        def stats():
            self.num_polls += 1
            return self.stats

        @app.get("/v1/speculation", **guarded)
        def speculation():
            return self.speculation

        @app.patch("/v1/speculation", **guarded)
        async def change(request: Request):
            changes = await self.note(request)
            if self.change_refusal:
                return JSONResponse(self.change_refusal, 400)
            self.speculation = {**self.speculation, **changes}
            return self.speculation

        @app.post("/v1/completions", **guarded)
        async def complete(request: Request):
            return await self.answer(request, lambda text: {"text": text})

        @app.post("/v1/chat/completions", **guarded)
        async def chat(request: Request):
            return await self.answer(request, lambda text: {"delta": {"content": text}})

        return app

    async def note(self, request):
        body = await request.json()
        self.asked.append((request.url.path, body, dict(request.headers)))
        return body

    async def answer(self, request, choice):
        body = await self.note(request)
        if self.refusal:
            status, content, headers = self.refusal
            return JSONResponse(content, status, headers)
        assert body["stream"]
        assert body["return_tokens"]
        assert body["stream_options"] == {"include_usage": True}
        chunks = self.chunks(choice)
        return StreamingResponse(chunks, media_type="text/event-stream")

    async def chunks(self, choice):
        head = self.pieces[:-1]
        steps = [*(head[i : i + 3] for i in range(0, len(head), 3)), self.pieces[-1:]]
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            try:
                while last and not self.held.is_set():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.left.set()
                raise
            tokens = [{"text": text, "source": source} for source, text in step]
            text = "".join(text for _, text in step)
            reason = "length" if last and not self.broken else None
            chunk = {**choice(text), "index": 0, "finish_reason": reason, "tokens": tokens}
            yield event({"choices": [chunk]})
        if self.broken:
            yield event(self.broken)
            return
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.pieces)}
        usage["total_tokens"] = 7 + len(self.pieces)
        yield event({"choices": [], "usage": {**usage, "speculation": self.usage}})
        yield "data: [DONE]\n\n"


def event(data):
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def serving(fake):
    """Serve on a free port until the context ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(fake.app(), log_level="warning", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        try:
            yield fake
        finally:
            fake.held.set()
            server.should_exit = server.force_exit = True
            thread.join()
