"""API keys of requests."""

from __future__ import annotations

import hmac

from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import Request

from draftwise.serving.errors import UnauthorizedError


def authorize(request: Request) -> None:
    """Check the API key of a request, if the server has keys, and note which one it is.

    Raises:
        UnauthorizedError: the key is missing or unknown.
    """
    keys = request.app.state.service.settings.api_keys
    scheme, token = get_authorization_scheme_param(request.headers.get("Authorization"))
    if scheme.lower() != "bearer":
        token = ""
    # Compare with all keys in constant time, so that timing reveals nothing about them.
    matches = [hmac.compare_digest(token.encode(), key.encode()) for key in keys]
    if keys and not any(matches):
        raise UnauthorizedError("api_key", "missing or invalid: send Authorization: Bearer KEY")
    request.state.client = str(matches.index(True)) if keys else ""
