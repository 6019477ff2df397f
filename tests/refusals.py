"""Errors that calls must end in."""

import re

from draftwise.errors import DraftwiseError


def error_of(call, *arguments, error=DraftwiseError, match="", **named):
    """The error of a call. Where there is none, or another, the failure names the arguments.

    Args:
        call: a function or a class.
        *arguments: of the call.
        error: type of the error.
        match: regular expression that is found in its text.
        **named: further arguments of the call.
    """
    found = None
    try:
        call(*arguments, **named)
    except error as caught:
        found = caught
    assert found is not None, f"accepted: {arguments} {named}"
    assert re.search(match, str(found)), f"of {arguments} {named}"
    return found
