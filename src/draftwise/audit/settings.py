"""Settings of an audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.audit.address import server_address
from draftwise.errors import InvalidParameterError
from draftwise.values import integer, number, set_fields, text_name

GREEDY, SAMPLING, INVARIANTS = "greedy", "sampling", "invariants"
CHECKS = (GREEDY, SAMPLING, INVARIANTS)
_FEWEST_ANSWERS = 200


@dataclass(frozen=True)
class AuditSettings:
    """What is audited, against what, and within which limits.

    Attributes:
        url: address of the server with speculation, with or without ``/v1`` at its end.
        baseline: address of a server of the same model without speculation; None for the audited
            server with speculation switched off in each request.
        baseline_model: the same model, loaded by Draftwise without speculation: a folder, hub id,
            GGUF file or zoo:NAME.
        off: fields of a request that switch speculation off in the audited server; ``None`` for
            those known of Draftwise and llama.cpp.
        model: name of the model in the API; None for the first model that the server lists.
        chat: ask by chat completions, which apply the model's chat template.
        checks: kinds of checks, out of ``greedy``, ``sampling`` and ``invariants``.
        prompts: JSON lines with prompt, question, turns or text; None for the bundled prompts.
        num_prompts: maximum number of prompts that are answered greedily.
        max_tokens: number of tokens of a greedy answer.
        requests: maximum number of answers that are asked of both servers together.
        minutes: maximum duration of the audit.
        bias: the sampling ends when a bias of this total variation in all distributions would have
            been seen with probability 0.95.
        concurrency: number of answers that are asked at once.
        allow_hosts: hosts other than this machine that may be asked.
        api_key: key of the audited server and of the baseline's, if they require a key.

    Raises:
        InvalidParameterError: a value is out of range, an address is not on this machine and not
            allowed, or there are two baselines.
    """

    url: str
    baseline: str | None = None
    baseline_model: str | None = None
    off: Mapping[str, Any] | None = None
    model: str | None = None
    chat: bool = False
    checks: tuple[str, ...] = CHECKS
    prompts: Path | None = None
    num_prompts: int = 24
    max_tokens: int = 48
    requests: int = 200_000
    minutes: float = 10.0
    bias: float = 0.03
    concurrency: int = 16
    allow_hosts: tuple[str, ...] = ()
    api_key: str | None = None

    def __post_init__(self) -> None:
        text_name("url", self.url, "server")
        for name, least in (("num_prompts", 1), ("max_tokens", 8), ("concurrency", 1)):
            integer(name, getattr(self, name), least)
        integer("requests", self.requests, _FEWEST_ANSWERS)
        number("minutes", self.minutes, 0.0, 60.0 * 24, low_open=True)
        number("bias", self.bias, 0.001, 1.0)
        unknown = [each for each in self.checks if each not in CHECKS]
        if unknown or not self.checks:
            raise InvalidParameterError(
                "checks", f"must be some of {', '.join(CHECKS)}, got {', '.join(self.checks)!r}"
            )
        given = [
            name
            for name in ("baseline", "baseline_model", "off")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise InvalidParameterError(given[1], f"cannot be combined with {given[0]}")
        set_fields(self, url=self._address("url", self.url))
        if self.baseline is not None:
            set_fields(self, baseline=self._address("baseline", self.baseline))

    def _address(self, field: str, url: str) -> str:
        reason = f"an audit sends it up to {self.requests} requests"
        return server_address(field, url, self.allow_hosts, reason)
