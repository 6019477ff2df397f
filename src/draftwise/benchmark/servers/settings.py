"""Settings of a benchmark of servers."""

from __future__ import annotations

from dataclasses import dataclass

from draftwise.audit.address import server_address
from draftwise.errors import InvalidParameterError
from draftwise.values import integer, number, set_fields

_REQUESTS_PER_CLIENT, _FEWEST_REQUESTS, _SECONDS_OF_ARRIVALS = 4, 8, 10
MOST_CLIENTS = 1024


@dataclass(frozen=True)
class LoadSettings:
    """The servers that are measured, and the load on them.

    Attributes:
        servers: address of an OpenAI-compatible server, optionally with a name for the tables:
            ``NAME=URL``. Ratios are relative to the first.
        concurrency: numbers of clients, each of which sends its next request after an answer.
        request_rate: requests that arrive in a second, at random (Poisson), in place of clients;
            None for clients.
        requests: number of prompts of a turn; None for four per client or those of ten seconds, at
            least eight.
        model: name of the model in the API; None for the first model that each server lists.
        allow_hosts: host other than this machine that may be asked.
        api_key: key of the servers, if they require a key.
        notes: text that is stored with the results, such as the command that started a server.

    Raises:
        InvalidParameterError: a value is out of range, two servers have the same name, or an
            address is not on this machine and not allowed.
    """

    servers: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (1, 4, 16)
    request_rate: float | None = None
    requests: int | None = None
    model: str | None = None
    allow_hosts: tuple[str, ...] = ()
    api_key: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = (integer("concurrency", each, 1, MOST_CLIENTS) for each in self.concurrency)
        set_fields(self, concurrency=tuple(dict.fromkeys(numbers)))
        if self.request_rate is not None:
            number("request_rate", self.request_rate, 0.0, 1e6, low_open=True)
        if self.requests is not None:
            integer("requests", self.requests, 1)
        names = [name for name, _ in self.addresses() if name is not None]
        for name in names:
            if names.count(name) > 1:
                raise InvalidParameterError("servers", f"two servers have the name {name!r}")

    def addresses(self) -> list[tuple[str | None, str]]:
        """Name, if one was given, and address of each server."""
        found = []
        for text in self.servers:
            before, equals, after = text.partition("=")
            # An address without a name may have a "=" too, after its scheme.
            name, url = (before, after) if equals and "://" not in before else (None, text)
            reason = "a benchmark puts it under load"
            found.append((name, server_address("servers", url, self.allow_hosts, reason)))
        return found

    def num_requests(self, concurrency: int | None) -> int:
        """Number of prompts of a turn.

        Args:
            concurrency: number of clients; ``None`` for requests that arrive at random.
        """
        if self.requests is not None:
            return self.requests
        if concurrency is not None:
            return max(_FEWEST_REQUESTS, _REQUESTS_PER_CLIENT * concurrency)
        assert self.request_rate is not None
        return max(_FEWEST_REQUESTS, round(_SECONDS_OF_ARRIVALS * self.request_rate))
