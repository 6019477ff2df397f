"""The speculation of a server: how requests switch it off, and how much was drafted."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from draftwise.audit.client import Server

# Names of vLLM, which Draftwise uses too.
_DRAFTED, _ACCEPTED = (
    re.compile(
        rf"^vllm:spec_decode_num_{name}_tokens(?:_total)?(?:{{[^}}]*}})? (\S+)$", re.MULTILINE
    )
    for name in ("draft", "accepted")
)
# The setting of a request of llama.cpp's server, if it speculates.
_LLAMA_CPP = "speculative.n_max"


def engine_of(server: Server) -> str:
    """The engine of a server, as far as it can be told."""
    if server.owner in ("", "user", "openai"):
        return "unknown"
    return {"llamacpp": "llama.cpp", "library": "ollama"}.get(server.owner, server.owner)


def fields_without_speculation(server: Server) -> dict[str, Any] | None:
    """Fields of a request that switch speculation off; ``None`` if none are known."""
    if _json(server.get("/v1/speculation")) is not None:
        return {"speculation": {"enabled": False}}
    settings = (_json(server.get("/props")) or {}).get("default_generation_settings") or {}
    if isinstance(settings, dict) and _LLAMA_CPP in {**settings, **settings.get("params", {})}:
        return {_LLAMA_CPP: 0}
    return None


class DraftCounter:
    """Counts the drafted tokens of a server from now on, of all its clients."""

    def __init__(self, server: Server) -> None:
        """Remember the counts of the server's metrics."""
        self._server = server
        self._start = self._metrics()
        self._start_reported = server.num_drafted or 0, server.num_accepted

    def count(self) -> tuple[int, int] | None:
        """Verified and accepted drafted tokens; ``None`` if the server reports neither."""
        server = self._server
        if server.num_drafted is not None:
            drafted, accepted = self._start_reported
            return server.num_drafted - drafted, server.num_accepted - accepted
        now = self._metrics()
        if now is None or self._start is None:
            return None
        return now[0] - self._start[0], now[1] - self._start[1]

    def _metrics(self) -> tuple[int, int] | None:
        text = self._server.get("/metrics") or ""
        found = [pattern.findall(text) for pattern in (_DRAFTED, _ACCEPTED)]
        if not all(found):
            return None
        drafted, accepted = (round(sum(map(float, values))) for values in found)
        return drafted, accepted


def _json(text: str | None) -> dict[str, Any] | None:
    with suppress(ValueError, TypeError):
        content = json.loads(text or "")
        return content if isinstance(content, dict) else None
    return None
