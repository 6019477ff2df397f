"""``ngram``: continues like the latest earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.engine.proposers.base import TokenProposer
from draftwise.engine.proposers.by_name import register
from draftwise.engine.request import Request

# The longest and the shortest number of last tokens that are looked up.
_LONGEST, _SHORTEST = 3, 1


@register
class NgramProposer(TokenProposer):
    """Looks up the last three tokens in the request's text, then the last two, then the last one.

    This is prompt lookup decoding (Saxena 2023), a simple baseline. ``suffix`` finds more.
    """

    name = "ngram"
    summary = "continues like the latest occurrence of the last 3, 2 or 1 tokens"

    def continuation(self, request: Request, max_tokens: int) -> Sequence[int]:
        """The tokens after the latest earlier occurrence of the last tokens."""
        return latest_continuation(request.tokens, max_tokens)


def latest_continuation(tokens: Sequence[int], max_tokens: int) -> Sequence[int]:
    """The tokens after the latest earlier occurrence of a text's last tokens.

    Args:
        tokens: the text.
        max_tokens: maximum number of tokens to return.
    """
    for size in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        wanted = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start + size - 1] == wanted[-1] and tokens[start : start + size] == wanted:
                return tokens[start + size : start + size + max_tokens]
    return ()
