"""The baseline reads its own answers as parts of prompts.

Engines may round differently when they read several tokens in one pass, as they do with prompts and
with drafts, than when they generate them one after another. A baseline that answers one request at
a time shows no such difference in repeated answers, but it shows it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.audit.answers import ScoredToken
from draftwise.audit.client import Model
from draftwise.errors import ServerError

# The field with which llama.cpp's server computes a prompt again.
_FRESH = {"cache_prompt": False}


class Rereader:
    """Asks a baseline for the next token after a prompt and the beginning of its answer."""

    def __init__(self, baseline: Model, num_logprobs: int, temperature: float) -> None:
        """Ask nothing yet.

        Args:
            baseline: the baseline, which completes texts.
            num_logprobs: most likely tokens that it reports.
            temperature: that of its answers.
        """
        self._baseline, self._fresh = baseline, dict(_FRESH)
        self._fields = {
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": num_logprobs,
        }

    def next_token(
        self, prompt: str, tokens: Sequence[str], num_prompt_tokens: int | None
    ) -> ScoredToken | None:
        """The next token and its log-probabilities.

        Args:
            prompt: the prompt.
            tokens: texts of the first tokens of the answer.
            num_prompt_tokens: tokens of the prompt.

        Returns:
            ``None`` if the baseline does not read the same tokens, or refuses the request.

        Raises:
            SpentError: the limit of the audit is reached.
        """
        text = prompt + "".join(tokens)
        try:
            try:
                response = self._baseline.ask(text, **self._fields, **self._fresh)
            except ServerError:
                if not self._fresh:
                    raise
                self._fresh = {}
                response = self._baseline.ask(text, **self._fields)
        except ServerError:
            return None
        counted = response.usage.get("prompt_tokens")
        if num_prompt_tokens is None or counted != num_prompt_tokens + len(tokens):
            return None
        return next(iter(response.answers[0].tokens or ()), None)


def margin_change(token: ScoredToken, reread: ScoredToken) -> float:
    """How much reading changes the difference of the two best log-probabilities; 0 if unknown."""
    best = sorted(token.top, key=lambda text: -token.top[text])[:2]
    if len(best) < 2 or any(text not in reread.top for text in best):
        return 0.0
    one, two = best
    return abs(token.top[one] - token.top[two] - reread.top[one] + reread.top[two])


def change(token: ScoredToken, reread: ScoredToken) -> float:
    """How much reading changes the log-probability of a token; 0 if it is not known."""
    return abs(token.log_p - reread.top[token.text]) if token.text in reread.top else 0.0
