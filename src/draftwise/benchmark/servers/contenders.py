"""Contenders of a benchmark of servers: a server, and how its requests set its speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwise.audit.client import Server
from draftwise.audit.speculation import (
    engine_of,
    fields_without_speculation,
    json_page,
    speculation_settings,
)
from draftwise.benchmark.contenders import Setting
from draftwise.benchmark.titles import BASELINE
from draftwise.errors import InvalidParameterError, ServerError

_PROBE = "The capital of France is"
# Fields that make servers do the same work. Of values for the same field, the first that a server
# accepts is sent. Some servers filter, penalise or end answers by the files of the model otherwise.
SAME_WORK: tuple[tuple[str, Any], ...] = (
    ("ignore_eos", True),
    ("top_k", 0),
    ("top_k", -1),
    ("min_p", 0.0),
    ("repetition_penalty", 1.0),
)
# Fields by which a prompt that was asked before is computed again.
_CACHE_SALT, _CACHE_PROMPT = "cache_salt", "cache_prompt"
_FRESH: tuple[tuple[str, Any], ...] = ((_CACHE_SALT, "probe"), (_CACHE_PROMPT, False))


@dataclass(frozen=True)
class ServerContender:
    """A server with a setting of its speculation.

    Attributes:
        name: name in the report.
        server: the server.
        label: name of the server.
        fields: fields of every request.
        learns: whether a policy or its guard adapts while it runs.
        is_fixed: whether it drafts a fixed number of tokens.
        has_salt: whether requests with another ``cache_salt`` share no cached prefixes.
        not_taken: fields that the server refuses, so that its work may differ.
    """

    name: str
    server: Server
    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    learns: bool = False
    is_fixed: bool = False
    has_salt: bool = False
    not_taken: tuple[str, ...] = ()

    def fields_of(self, seed: int | None, salt: str) -> dict[str, Any]:
        """Fields of one request.

        Args:
            seed: seed of the request, if any.
            salt: requests with another salt share no cached prefixes.
        """
        own = dict(self.fields)
        if seed is not None:
            own["seed"] = seed
        if self.has_salt:
            own[_CACHE_SALT] = salt
        return own

    def describe(self) -> dict[str, Any]:
        """How it is asked, as JSON-compatible values."""
        return {"server": self.label, "fields": dict(self.fields), "not_taken": [*self.not_taken]}


def server_contenders(
    label: str,
    server: Server,
    policies: Sequence[str] | None,
    fields: Mapping[str, Any],
    *,
    stop_at_eos: bool = False,
) -> list[ServerContender]:
    """The contenders of one server.

    Args:
        label: name of the server.
        server: the server.
        policies: settings of the speculation of a server of Draftwise (:class:`Setting`); ``None``
            for no speculation and what the server does by itself. Other servers run as they are,
            and without speculation where a request can switch it off.
        fields: fields of every request. The values of :data:`SAME_WORK` are added where the fields
            do not set them and the server takes them.
        stop_at_eos: let answers end at an end-of-sequence token.

    Raises:
        InvalidParameterError: the server has no such policy, draft or draft length.
        ServerError: the server refuses a plain request.
    """
    others = {*fields, "ignore_eos"} if stop_at_eos else {*fields}
    wanted = [(name, value) for name, value in SAME_WORK if name not in others]
    taken = _taken(server, [*wanted, *_FRESH])
    has_salt = taken.pop(_CACHE_SALT, None) is not None
    names = dict.fromkeys(name for name, _ in wanted)
    missing = [name for name in names if name not in taken]
    if not has_salt and _CACHE_PROMPT not in taken:
        missing.append(_CACHE_SALT)
    common = {**taken, **fields}

    def contender(name: str, own: Mapping[str, Any], setting: Setting | None) -> ServerContender:
        return ServerContender(
            name,
            server,
            label,
            {**common, **own},
            setting is not None and setting.policy != BASELINE,
            setting is not None and setting.policy == "fixed",
            has_salt,
            tuple(missing),
        )

    state = speculation_settings(server)
    if state is not None and state.get("enabled"):
        as_is = Setting(str(state.get("policy")))
        if policies is None:
            off = contender(f"{label} {BASELINE}", {"speculation": {"enabled": False}}, None)
            return [off, contender(label, {}, as_is)]
        settings = {text: Setting.parse(text) for text in policies}
        return [
            contender(f"{label} {text}", {"speculation": _speculation(setting, state)}, setting)
            for text, setting in settings.items()
        ]
    own = None if state is not None else fields_without_speculation(server)
    found = [contender(label, {}, None)]
    return found if own is None else [contender(f"{label} {BASELINE}", own, None), *found]


def describe_server(server: Server, label: str) -> dict[str, Any]:
    """What is known of a server, as JSON-compatible values."""
    version = (json_page(server, "/version") or {}).get("version")
    build = (json_page(server, "/props") or {}).get("build_info")
    return {
        "name": label,
        "url": server.url,
        "engine": engine_of(server),
        "version": version or build,
        "model": server.model,
        "speculation": speculation_settings(server),
    }


def _taken(server: Server, wanted: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Those fields that a server accepts, with the first accepted value of each.

    Raises:
        ServerError: it refuses a plain request.
    """
    server.ask(_PROBE, max_tokens=1)
    taken: dict[str, Any] = {}
    for name, value in wanted:
        if name not in taken and _takes(server, name, value):
            taken[name] = value
    return taken


def _takes(server: Server, name: str, value: Any) -> bool:
    try:
        server.ask(_PROBE, max_tokens=1, **{name: value})
    except ServerError as error:
        if error.is_failure:
            raise
        return False
    return True


def _speculation(setting: Setting, state: Mapping[str, Any]) -> dict[str, Any]:
    """The field ``speculation`` of a request to a server of Draftwise.

    Raises:
        InvalidParameterError: the server has no such policy, draft or draft length.
    """
    if setting.width is not None:
        raise InvalidParameterError(
            "policies", "a request cannot set a tree width; start the server with --tree-width"
        )
    usable = [each["name"] for each in state["policies"] if each["usable"]]
    if setting.policy == BASELINE:
        return {"enabled": False}
    if setting.policy not in usable:
        raise InvalidParameterError(
            "policies", f"the server cannot use {setting.policy!r}; it can use {', '.join(usable)}"
        )
    found: dict[str, Any] = {"policy": setting.policy}
    if setting.length is not None:
        most = state["num_speculative_tokens"]
        if setting.length > most:
            raise InvalidParameterError(
                "policies",
                f"the server drafts at most {most} tokens, got {setting.length}; start it with "
                f"--num-speculative-tokens {setting.length}",
            )
        found["num_speculative_tokens"] = setting.length
    if setting.draft is not None:
        drafts = str(state.get("draft")).split(", ")
        if setting.draft not in drafts:
            raise InvalidParameterError(
                "policies",
                f"the drafts of the server are {', '.join(drafts)}, got {setting.draft!r}",
            )
        found["draft"] = setting.draft
    return found
