"""The speculation of a server: how requests switch it off, and how much was drafted."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from draftwise.audit.client import Server
from draftwise.audit.draft_counts import DraftCounts

# Engines by the owner of their models, where the two have different names.
_ENGINES = {"llamacpp": "llama.cpp", "library": "ollama", "me": "llama-cpp-python"}
# The setting of a request of llama.cpp's server, if it speculates, in versions that have it.
_LLAMA_CPP = "speculative.n_max"


def engine_of(server: Server) -> str:
    """The engine of a server, as far as it can be told."""
    if server.owner in ("", "user", "openai"):
        return "unknown"
    return _ENGINES.get(server.owner, server.owner)


def draft_counts(server: Server) -> DraftCounts | None:
    """Counts of the server's metrics; ``None`` if it publishes none."""
    return DraftCounts.read(server.get("/metrics") or "")


def speculation_settings(server: Server) -> dict[str, Any] | None:
    """The speculation settings of a server of Draftwise; ``None`` for other servers."""
    return json_page(server, "/v1/speculation")


def fields_without_speculation(server: Server) -> dict[str, Any] | None:
    """Fields of a request that switch speculation off; ``None`` if none are known."""
    if speculation_settings(server) is not None:
        return {"speculation": {"enabled": False}}
    settings = (json_page(server, "/props") or {}).get("default_generation_settings") or {}
    if isinstance(settings, dict) and _LLAMA_CPP in {**settings, **settings.get("params", {})}:
        return {_LLAMA_CPP: 0}
    return None


class DraftCounter:
    """Counts the drafted tokens of a server from now on, of all its clients."""

    def __init__(self, server: Server) -> None:
        """Remember the counts of the server's metrics."""
        self._server = server
        self._start = draft_counts(server)
        self._start_reported = server.num_drafted or 0, server.num_accepted

    def count(self) -> tuple[int, int] | None:
        """Verified and accepted drafted tokens; ``None`` if the server reports neither."""
        server = self._server
        if server.num_drafted is not None:
            drafted, accepted = self._start_reported
            return server.num_drafted - drafted, server.num_accepted - accepted
        now = draft_counts(server)
        if now is None or self._start is None:
            return None
        counted = now.since(self._start)
        return counted.num_verified, counted.num_accepted


def json_page(server: Server, path: str) -> dict[str, Any] | None:
    """The JSON object at a path; ``None`` if there is none."""
    with suppress(ValueError, TypeError):
        content = json.loads(server.get(path) or "")
        return content if isinstance(content, dict) else None
    return None
