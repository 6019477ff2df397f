"""Addresses of servers. Only this machine is asked, unless another host is named."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from draftwise.errors import InvalidParameterError


def server_address(field: str, url: str, allow_hosts: Sequence[str], reason: str) -> str:
    """The address of a server without a trailing ``/v1``.

    Args:
        field: parameter that has the address.
        url: address as the user gave it.
        allow_hosts: hosts other than this machine that may be asked.
        reason: clause of the error on another host, which says what would be sent to it.

    Raises:
        InvalidParameterError: it is not an address, or its host is neither this machine nor
            allowed.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidParameterError(field, f"{url!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidParameterError(field, f"must be http://HOST:PORT, got {url!r}")
    if not _is_this_machine(host) and host not in allow_hosts:
        raise InvalidParameterError(
            field,
            f"{host!r} is not this machine; {reason}. If that is meant, add --allow-host {host}",
        )
    return url.rstrip("/").removesuffix("/v1")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
